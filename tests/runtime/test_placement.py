"""Models and inputs on the CPU: what is copied, when again, and what comes back."""

import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from kp_dynamo import TPUDeviceError, clear_cache
from kp_dynamo.capture.tensor_devices import placement_mode
from kp_dynamo.runtime.placement import Placement, digest_of
from tests.spine import DEVICES, check_like_eager, compiled, run_script


@pytest.fixture(scope="module")
def linear():
    """A Linear and a function that checks the compiled one against it."""
    model, x = nn.Linear(3, 2), torch.linspace(-1, 1, 12).reshape(4, 3)
    run = compiled(model)

    def check():
        torch.testing.assert_close(run(x), model(x))

    check()
    return model, check


def assign_data(weight):
    weight.data = torch.randn(2, 3)


def write_numpy(weight):
    weight.detach().numpy()[0, 0] += 1


def write_through_a_view(weight):
    with torch.no_grad():
        weight[1].mul_(3)


def swap_two_values(weight):
    weight.data[0, 0], weight.data[1, 1] = weight.data[1, 1].clone(), weight.data[0, 0].clone()


CHANGES = [lambda w: w.data.add_(1), assign_data, write_numpy, write_through_a_view, swap_two_values]


@pytest.mark.parametrize("change", CHANGES, ids=["data.add_", "data =", "numpy", "view", "swap"])
def test_a_changed_parameter_is_copied_again(linear, change):
    model, check = linear
    for _ in range(2):
        change(model.weight)
        check()


def test_load_state_dict_and_copies_back_are_seen(linear):
    model, check = linear
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    model.weight.data.zero_()
    check()
    model.load_state_dict(saved)
    check()


def test_changed_inference_tensors_are_seen():
    run = compiled(lambda x, w: x @ w)
    with torch.inference_mode():
        x, w = torch.ones(2, 3), torch.ones(3, 2)
        for factor in (1, 2, 4):
            assert run(x, w).tolist() == [[3.0 * factor] * 2] * 2
            w.mul_(2)


@pytest.fixture
def copies(monkeypatch):
    """Shapes of what the placement copies to the device, in order."""
    shapes, original = [], torch.Tensor.to

    def to(tensor, *args, **kwargs):
        target = args[0] if args else None
        if isinstance(target, torch.device) and target.type == "xla" and tensor.device.type == "cpu":
            shapes.append(tuple(tensor.shape))
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return shapes


def test_unchanged_weights_are_copied_once(copies):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).eval()
    run = compiled(model)
    with torch.no_grad():
        for _ in range(5):
            run(torch.randn(2, 3))
    # Two parameters of each layer, two statistics; new inputs go with the program and are not kept.
    assert sorted(copies) == [(5,)] * 5 + [(5, 3)]
    model[0].weight.data.add_(1)
    with torch.no_grad():
        run(torch.randn(2, 3))
    assert sorted(copies) == [(5,)] * 5 + [(5, 3)] * 2


def test_a_parameter_that_another_graph_uses_is_not_copied_again(copies):
    model = nn.Linear(3, 6)
    with torch.no_grad():
        for fn in (model, lambda x: model(x) * 2):
            compiled(fn)(torch.ones(1, 3))
    assert sorted(copies) == [(6,), (6, 3)]


def test_a_copy_is_freed_with_its_tensor():
    placement, tensor = Placement(), nn.Parameter(torch.ones(3))
    on_device = weakref.ref(placement.place(tensor))
    assert on_device() is placement.place(tensor)
    del tensor
    gc.collect()
    assert on_device() is None


def test_a_digest_depends_on_bytes_shape_stride_and_dtype():
    base = torch.arange(6.0)
    others = [
        base + 1,
        base.reshape(2, 3),
        base.reshape(3, 2).t(),
        base.view(torch.int32),
        base.reshape(2, 3).t().contiguous(),
        torch.tensor([0.0, 1, 2, 3, 4, -5]),
    ]
    assert len({digest_of(t) for t in [base, *others]}) == 7
    assert digest_of(base) == digest_of(base.clone())
    assert digest_of(torch.tensor([0.0])) != digest_of(torch.tensor([-0.0]))
    assert digest_of(torch.tensor([float("nan")])) == digest_of(torch.tensor([float("nan")]))


@pytest.mark.parametrize("length", [1, 2])
def test_a_reused_input_of_one_element_or_none_with_a_stride(length):
    x = torch.arange(3)[1:length:2]
    run = compiled(lambda x: x + 1)
    for _ in range(4):
        assert run(x).tolist() == (x + 1).tolist()


@pytest.mark.parametrize("device", DEVICES)
def test_a_write_to_an_input_right_after_the_call_does_not_reach_the_result(device):
    x = torch.linspace(-1, 1, 400 * 400).reshape(400, 400)
    expected = x @ x @ x
    run = compiled(lambda x: x @ x @ x)
    mine = x.clone().to(device)
    for _ in range(3):
        mine.copy_(x)
        result = run(mine)
        mine.zero_()
        torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-3)


def test_a_write_to_a_weight_between_forward_and_backward_does_not_reach_the_device():
    w, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    expected = torch.autograd.grad((x @ w).tanh().sum(), x)
    y = compiled(lambda x, w: (x @ w).tanh())(x, w).sum()
    w.data.add_(5)
    # What was saved was saved with its values, as a device would.
    torch.testing.assert_close(torch.autograd.grad(y, x), expected)


def test_activations_that_are_saved_stay_on_the_device():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(5, 3)
    y = compiled(model)(x)
    saved = {tuple(t.shape): t.device.type for t in y.grad_fn.saved_tensors}
    assert saved.pop((5, 4)) == "xla"
    # The rest are the caller's own tensors, which need no transfer back.
    assert set(saved.values()) == {"cpu"}
    assert all(t.data_ptr() in {p.data_ptr() for p in (x, *model.parameters())}
               for t in y.grad_fn.saved_tensors if t.device.type == "cpu")  # fmt: skip
    y.sum().backward()
    assert {p.grad.device.type for p in model.parameters()} == {"cpu"}


def test_mutated_inputs_and_statistics_come_back():
    check_like_eager(lambda x, steps: (x.mul_(2), steps.add_(1))[0] + 1, torch.ones(3), torch.tensor(4))
    norm = nn.BatchNorm1d(2, momentum=1.0)
    compiled(norm)(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert norm.running_mean.tolist() == [2, 4]
    assert norm.num_batches_tracked.item() == 1


def with_device_arguments(x):
    device = x.device
    return (
        x + torch.arange(3, device=device),
        torch.zeros(2, device="cpu"),
        torch.ones(2, device=device).to("cpu"),
        x.new_ones(3).to(device),
    )


def test_device_arguments_mean_what_they_say():
    for device in DEVICES:
        results = compiled(with_device_arguments)(torch.ones(3, device=device))
        assert [r.device.type for r in results] == [device, "cpu", "cpu", device]
        assert [r.tolist() for r in results] == [[1, 2, 3], [0, 0], [1, 1], [1, 1, 1]]


def test_a_model_that_moves_its_own_tensors():
    there, back = compiled(lambda x: (x.to("xla") * 2, (x.to("xla") + 1).cpu()))(torch.ones(3))
    assert (there.device.type, back.device.type) == ("xla", "cpu")
    assert (there.sum().item(), back.sum().item()) == (6, 6)


MOVES = {
    "cpu": lambda x: x.cpu().add_(1),
    "to": lambda x: x.to("xla").add_(1),
    "a part": lambda x: x.cpu()[0].add_(1),
    "there and back": lambda x: x.cpu().to("xla").add_(1),
    "two": lambda x: (lambda y: (y.cpu(), y.cpu().add_(1)))(x * 2),
}


def written_behind(x):
    copy = x.to("xla" if x.device.type == "cpu" else "cpu")
    x.add_(1)
    return copy


@pytest.mark.parametrize("name", [*MOVES, "written behind"])
def test_what_is_moved_to_another_device_is_a_copy(name):
    fn = MOVES.get(name, written_behind)
    device = "cpu" if name == "to" else "xla"
    x, expected = torch.ones(2).to(device), torch.ones(2).to(device)
    found, wanted = compiled(fn)(x), fn(expected)
    for mine, eager in zip(pytree.tree_leaves((found, x)), pytree.tree_leaves((wanted, expected)), strict=True):
        assert (mine.tolist(), mine.device) == (eager.tolist(), eager.device)


def test_a_gradient_crosses_to_the_device_a_result_is_moved_to():
    x = torch.ones(3, requires_grad=True)
    compiled(lambda x: (x * 2).to("xla"))(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


def test_one_log_line_says_what_is_copied_and_how_to_avoid_it(caplog):
    placement = Placement()
    with caplog.at_level(logging.INFO, "kp_dynamo.runtime.placement"):
        for _ in range(2):
            placement.place(nn.Parameter(torch.ones(2)))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kp_dynamo.runtime.placement"]
    assert "parameters and reused inputs when their bytes change, new inputs and results at every call" in line
    assert "model.to('xla')" in line


def test_where_tensors_must_be():
    cpu, xla, number = torch.ones(2), torch.ones(2, device="xla"), torch.tensor(1.0)
    assert placement_mode([cpu, number], "xla") == "cpu"
    assert placement_mode([xla, number], "cpu") == "xla"
    assert placement_mode([number], "xla") == "cpu"
    assert placement_mode([], "xla") == "xla"
    with pytest.raises(TPUDeviceError, match=r"1 graph inputs are on xla:0 and 1 on the CPU .* shape \(2,\)"):
        placement_mode([cpu, xla], "cpu")
    with pytest.raises(TPUDeviceError, match=r"a graph input is on meta \(shape \(2,\)\)\. Allowed: all on the CPU"):
        placement_mode([torch.ones(2, device="meta")], "cpu")


def test_an_xla_device_that_is_not_the_first_is_refused():
    """torch_xla would end the process."""
    with FakeTensorMode():
        second = torch.empty(2, device="xla:1")
    with pytest.raises(TPUDeviceError, match=r"is on xla:1 \(shape \(2,\)\).*all on xla:0"):
        placement_mode([second], "cpu")


@pytest.mark.slow
def test_only_the_first_xla_device_compiles_and_others_are_refused():
    source = """
import torch
from kp_dynamo import TPUConfig, TPUDeviceError, XLADeviceManager
devices = XLADeviceManager(TPUConfig())
there = torch.ones(2, device=devices.set_device(2)) * 3
devices.sync_all_devices()
assert (len(devices.devices), there.device.index, there.tolist()) == (4, 2, [3, 3])
double = torch.compile(lambda x: x * 2, backend="kp_tpu")
assert double(torch.ones(2, device="xla:0")).tolist() == [2, 2]
try:
    double(there)
except torch._dynamo.exc.BackendCompilerFailed as failed:
    assert isinstance(failed.inner_exception, TPUDeviceError), failed
    print("refused")
"""
    assert run_script(source, {"CPU_NUM_DEVICES": "4"}).strip() == "refused"


def test_a_0_dim_cpu_tensor_is_allowed_with_xla_tensors():
    run = compiled(lambda x, scale: x * scale)
    for value in (2.0, 3.0):
        assert run(torch.ones(2, device="xla"), torch.tensor(value)).tolist() == [value, value]


def test_clear_cache_drops_the_copies_and_nothing_breaks(copies):
    model = nn.Linear(3, 7)
    run = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(run(torch.ones(1, 3)), model(torch.ones(1, 3)))
        clear_cache()
    assert sorted(copies) == [(7,), (7,), (7, 3), (7, 3)]


def test_memory_shared_with_numpy_is_read_at_the_call():
    array = np.ones(3, dtype=np.float32)
    run, x = compiled(lambda x: x * 2), torch.from_numpy(array)
    for value in (1, 5, 7, 7):
        array[:] = value
        assert run(x).tolist() == [2 * value] * 3
