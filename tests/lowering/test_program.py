"""What becomes of a graph in XLA: product precision, names in the profiler; and what becomes of a process."""

import re

import pytest
import torch
import torch_xla
from torch.profiler import ProfilerActivity, profile

from kp_dynamo import clear_cache
from tests.spine import compiled, counted, run_script


@pytest.fixture
def programs(monkeypatch):
    """The text of every program that is compiled from here on."""
    texts, xlac = [], torch_xla._XLAC
    warm_up = xlac._xla_warm_up_cache

    def note(roots, devices):
        texts.append(xlac._get_xla_tensors_hlo(roots))
        return warm_up(roots, devices)

    monkeypatch.setattr(xlac, "_xla_warm_up_cache", note)
    clear_cache()
    return texts


def precisions_of(program):
    return re.findall(r"operand_precision={(\w+),\w+}", program)


def test_one_graph_at_three_precisions_is_three_programs(programs):
    x, seen = torch.ones(5, 5), []
    for precision in ("highest", "default", "high", "default"):
        torch._dynamo.reset()
        with counted() as counts:
            compiled(lambda x: x @ x, matmul_precision=precision)(x)
        seen.append((counts.programs, precisions_of(programs[-1])))
    assert seen[:3] == [(1, ["highest"]), (1, []), (1, ["high"])]
    assert seen[3][0] == 0


def test_the_precision_follows_torch_where_no_option_says_it(programs):
    before = torch.get_float32_matmul_precision()
    try:
        for setting, expected in (("highest", ["highest"]), ("high", ["high"]), ("medium", [])):
            torch.set_float32_matmul_precision(setting)
            torch._dynamo.reset()
            compiled(lambda x: x @ x + 1)(torch.ones(5, 5))
            assert precisions_of(programs[-1]) == expected
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch_xla._XLAC._xla_get_mat_mul_precision() == "default"


def test_numbers_are_in_the_program_and_arguments_are_its_parameters(programs):
    compiled(lambda x, y: x * 3.5 - y)(torch.ones(2, 3), torch.ones(2, 3))
    assert len(re.findall(r" parameter\(", programs[-1])) == 2
    assert "constant(3.5)" in programs[-1]


def test_graphs_carry_their_names_in_the_profiler():
    run, x = compiled(lambda x: (x * 2).sin()), torch.ones(3, requires_grad=True)
    run(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run(x).sum().backward()
        with torch.no_grad():
            run(x.detach())
    names = sorted(event.key for event in recorded.key_averages() if event.key.startswith("kp_tpu::"))
    assert [re.sub(r"\d+", "N", name) for name in names] == [
        "kp_tpu::N.backward", "kp_tpu::N.forward", "kp_tpu::N.inference",
    ]  # fmt: skip
    assert names[0].split(".")[0] == names[1].split(".")[0], "the number of the capture, as in logs and reports"


FORK = """
import os, sys
import torch, torch_xla
run = torch.compile(lambda x: x * 2, backend="kp_tpu")
placed, there = torch.ones(3), torch.ones(3, device=torch_xla.device())
for x in (placed, there):
    run(x)
new = torch.compile(lambda x: x * 3, backend="kp_tpu")
for call, x in ((run, placed), (run, there), (new, placed)):
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            call(x)
        except Exception as error:
            print(type(getattr(error, "inner_exception", error)).__name__, "spawn" in str(error), flush=True)
        os._exit(0)
    os.wait()
print(run(placed).tolist())
"""


def test_a_fork_after_the_client_has_started_is_an_error_that_says_what_to_do():
    *children, parent = run_script(FORK).splitlines()
    assert children == ["TPUDeviceError True"] * 3
    assert parent == "[2.0, 2.0, 2.0]"


ORDERS = """
import sys
{before}
import torch
import torch._dynamo.config as config
settings = config.get_config_copy()
assert {before!r} or "kp_dynamo" not in sys.modules
def run(backend="kp_tpu"):
    return torch.compile(lambda x, a: x + a, backend=backend)(torch.ones(2), 1.5).tolist()
print(run())
import kp_dynamo
print(run())
torch._dynamo.reset()
print(run(), run(kp_dynamo.kp_tpu))
# torch_xla switches two of them when it is imported.
print([name for name in settings if repr(settings[name]) != repr(config.get_config_copy()[name])])
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="never imported"),
        pytest.param("import kp_dynamo", id="imported before", marks=pytest.mark.slow),
    ],
)
def test_the_name_alone_is_enough_and_dynamo_s_settings_stay(before):
    *runs, changed = run_script(ORDERS.format(before=before)).splitlines()
    assert runs == ["[2.5, 2.5]", "[2.5, 2.5]", "[2.5, 2.5] [2.5, 2.5]"]
    assert changed == "[]"
