"""Each known limit is still one: a test fails where something has been mended, and the limit is to be struck off."""

import math
import os
import subprocess
import sys

import pytest
import torch
import torch_xla
from torch import nn

from bench.unit_workloads import workload
from kp_dynamo import aot_compile
from kp_dynamo.compat.known_limits import KNOWN_LIMITS
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.telemetry import snapshot
from tests.spine import run_script


def limit(words):
    """The one limit that says `words`; a test that names none is out of date."""
    (found,) = [known for known in KNOWN_LIMITS if words in known.what]
    return found


BEFORE_TORCH_XLA = """
import sys, torch, kp_dynamo
assert "torch_xla" not in sys.modules
try:
    torch.nn.Linear(2, 2).to("xla")
except (RuntimeError, NotImplementedError) as error:
    print(str(error).splitlines()[0])
import torch_xla
print(torch.nn.Linear(2, 2).to("xla").weight.device)
"""


def test_a_model_cannot_move_before_torch_xla_is_imported():
    assert "import torch_xla" in limit('`model.to("xla")` before torch_xla is imported').cure
    error, device = run_script(BEFORE_TORCH_XLA).splitlines()
    assert "xla" in error.lower()
    assert "torch_xla" not in error
    assert device == "xla:0"


def test_eager_work_is_taken_for_other_work():
    limit("pytorch/xla#8353")
    a, b = torch.ones(2).to("xla"), torch.full((2,), 2.0).to("xla")
    torch_xla.sync()
    assert ((a - b) * a).cpu().tolist() == [-1, -1]
    assert ((a - b) * b).cpu().tolist() == [2, 2]


def test_batch_norm_without_a_momentum_runs_in_eager_torch_xla():
    limit("BatchNorm(momentum=None)")
    x, models = torch.randn(5, 4), [nn.BatchNorm1d(4, momentum=None) for _ in range(2)]
    torch.compile(models[0].to("xla"), backend="kp_tpu")(x.to("xla")), models[1](x)
    torch.testing.assert_close(models[0].running_var.cpu() * 5 / 4, models[1].running_var)


def test_a_module_with_backward_hooks_runs_in_eager_torch_xla():
    assert limit("Backward hooks of a module")
    found = []
    for hook in (None, lambda module, grad_input, grad_output: None):
        torch._dynamo.reset()
        model = nn.Sequential(nn.ELU())
        if hook is not None:
            model[0].register_full_backward_hook(hook)
        leaf = torch.tensor([-2.0, 0.5]).to("xla").requires_grad_()
        torch.compile(model, backend="kp_tpu", options={"precision": "float32"})(leaf).sum().backward()
        found.append(leaf.grad.cpu())
    torch.testing.assert_close(found[0], torch.tensor([math.exp(-2), 1.0]))
    assert not torch.allclose(found[1], found[0])


def test_complex128_is_fetched_without_its_imaginary_part():
    limit("imaginary part")
    x = torch.tensor([1 + 2j], dtype=torch.complex128)
    assert x.to("xla").cpu().imag.item() == 0
    assert torch.equal(torch.view_as_complex(torch.view_as_real(x.to("xla")).cpu()), x)


def steps_of_the_first_group(device):
    a, b = (nn.Parameter(torch.ones(3).to(device)) for _ in range(2))
    optimizer = torch.optim.Adam([{"params": [a]}, {"params": [b]}], lr=0.1)
    step = torch.compile(optimizer.step, backend="kp_tpu")
    for _ in range(3):
        a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
        step()
    return optimizer.state[a]["step"].item()


def test_steps_of_several_groups_are_counted_wrong():
    limit("several parameter groups")
    assert [steps_of_the_first_group(device) for device in ("cpu", "xla")] == [3, 0]


SHARED_BUFFERS = """
import torch, torch_xla, kp_dynamo
a, b, x = torch.ones(4, 3).to("xla"), torch.zeros(4, 3).to("xla"), torch.ones(5, 4).to("xla")
run = torch.compile(lambda p, x: x @ p, backend="kp_tpu")
run(a, x), run(b, x)
b.copy_(a)
run(b, x)
a.add_(1)
torch_xla.sync()
try:
    b.cpu()
except RuntimeError as error:
    raise SystemExit("in flight" in str(error)) from None
"""


@pytest.mark.slow  # a process of its own
def test_a_target_network_loses_its_buffers():
    limit("load_state_dict(model.state_dict())")
    done = subprocess.run([sys.executable, "-c", SHARED_BUFFERS], capture_output=True, check=False)
    assert done.returncode == 1


SYNC_BESIDE_EAGER = """
import threading, time, torch, torch_xla
torch.ones(1, device="xla")
failed, until = threading.Event(), time.monotonic() + 20

def work(once):
    try:
        while not failed.is_set() and time.monotonic() < until:
            once()
    except RuntimeError:
        failed.set()

def make():
    assert (torch.ones(2, 3, device="xla").sum() + 1).item() == 7

threads = [threading.Thread(target=work, args=(once,)) for once in (torch_xla.sync, make)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
raise SystemExit("failed" if failed.is_set() else 0)
"""


@pytest.mark.slow  # a process of its own
def test_threads_of_eager_torch_xla_may_not_synchronise():
    assert "Let only one thread work eagerly" in limit("`torch_xla.sync()` fails while another thread").cure
    done = subprocess.run([sys.executable, "-c", SYNC_BESIDE_EAGER], capture_output=True, check=False)
    assert done.returncode != 0


@pytest.mark.slow
def test_libtpu_cannot_compile_the_attention_of_t5_at_highest():
    assert "matmul_precision" in limit("libtpu 0.0.21 cannot compile").cure
    made = workload("t5", 512)
    with pytest.raises(XLACompilationError, match="matmul_precision"):
        aot_compile(made.model, made.inputs, options={"level": "conservative"})
    assert aot_compile(made.model, made.inputs, options={"level": "conservative", "matmul_precision": "high"}).cycles


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_moving_a_module_unties_it():
    assert "set_swap_module_params_on_conversion(True)" in limit("unties weights").cure
    moved = Tied().to("xla")
    assert moved.head.weight is not moved.embedding.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        moved = Tied().to("xla")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert moved.head.weight is moved.embedding.weight


def test_each_seed_repeats_its_own_numbers():
    assert "`torch.manual_seed` repeats those of compiled graphs" in limit("torch_xla.manual_seed").cure
    device = torch_xla.device()
    x = torch.ones(64, device=device)
    compiled = torch.compile(lambda x: torch.rand_like(x), backend="kp_tpu")

    def repeats(seed, draw):
        seed(1)
        first = draw().cpu()
        seed(1)
        return torch.equal(first, draw().cpu())

    assert repeats(torch.manual_seed, lambda: compiled(x))
    assert not repeats(torch_xla.manual_seed, lambda: compiled(x))
    assert repeats(torch_xla.manual_seed, lambda: torch.rand(64, device=device))
    assert not repeats(torch.manual_seed, lambda: torch.rand(64, device=device))


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_shape_is_a_program(dynamic):
    assert limit("Without `buckets`, each set of shapes is a separate XLA program")
    compiled = torch.compile(torch.sin, backend="kp_tpu", dynamic=dynamic)
    before = snapshot()["programs"]
    for length in (11, 12, 13):
        compiled(torch.ones(length))
    assert snapshot()["programs"] - before == 3


@pytest.mark.filterwarnings("ignore")
def test_over_dynamos_limit_a_function_runs_eagerly():
    assert "recompile_limit" in limit("Without `buckets`, each set of shapes").what
    compiled = torch.compile(torch.cos, backend="kp_tpu", dynamic=False)
    before = snapshot()["programs"]
    with torch._dynamo.config.patch(recompile_limit=2):
        for length in (11, 12, 13):
            compiled(torch.ones(length))
    assert snapshot()["programs"] - before == 2


EARLY_BACKWARD = """
import torch
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
import torch_xla
layer = torch.nn.Linear(2, 2).to("xla")
torch.compile(layer, backend="kp_tpu")(torch.ones(1, 2, device="xla")).sum().backward()
"""


@pytest.mark.slow  # a process of its own
def test_a_cpu_backward_before_the_first_use_of_the_device_spoils_xla_backwards():
    assert "torch_xla.device()" in limit("a backward runs on the CPU before").cure
    done = subprocess.run(
        [sys.executable, "-c", EARLY_BACKWARD], env={**os.environ, "PJRT_DEVICE": "CPU"}, capture_output=True, text=True
    )
    assert "TPUDeviceError: a backward ran on the CPU before the XLA device was first used" in done.stderr
    cured = EARLY_BACKWARD.replace("import torch\n", "import torch, torch_xla\ntorch.ones(1, device='xla')\n", 1)
    subprocess.run([sys.executable, "-c", cured], env={**os.environ, "PJRT_DEVICE": "CPU"}, check=True)
