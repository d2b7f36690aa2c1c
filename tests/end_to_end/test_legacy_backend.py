"""torch_xla 2.5 to 2.8: what is refused there, and, run on one of them (`make test-compat`), what is wrong there."""

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from torch import nn
from torch.utils.checkpoint import checkpoint

from kp_dynamo import TPUConfigurationError, TPUDeviceError, kp_tpu
from kp_dynamo import legacy_backend as earlier
from kp_dynamo.capture.tensor_devices import placement_mode
from kp_dynamo.compat.known_limits import EARLIER_LIMITS
from kp_dynamo.compat.versions import CURE, earlier_version
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.legacy_backend import compile_with_stock

pytestmark = pytest.mark.compat

on_earlier = pytest.mark.skipif(earlier_version() is None, reason="only on torch_xla 2.5 to 2.8: make test-compat")
on_home = pytest.mark.skipif(earlier_version() is not None, reason="only on torch_xla 2.9")


def stock(fn, dynamic=None):
    return torch.compile(fn, backend=kp_tpu, dynamic=dynamic, options={"lowering": "stock"})


def graph_of(fn, *args):
    """What Dynamo captures."""
    captured = []
    torch.compile(fn, backend=lambda gm, inputs: captured.append(gm) or gm.forward)(*args)
    return captured[0]


@pytest.fixture
def a_graph():
    x = torch.ones(3, device=torch_xla.device())
    return graph_of(lambda x: x * 2 + 1, x), [x]


# What is refused; the version is made up.


def test_our_own_lowering_is_refused_with_what_is_allowed(a_graph):
    with pytest.raises(TPUConfigurationError, match=r"lowering='openxla' needs torch_xla 2.9, but 2.7.0 is") as raised:
        compile_with_stock(*a_graph, CompileOptions(), "2.7.0")
    assert "{'lowering': 'stock'}" in str(raised.value)
    assert CURE in str(raised.value)


REFUSED = [
    {"level": "conservative"},
    {"level": "balanced"},
    {"precision": "bfloat16"},
    {"fuse": True},
    {"checkpoint": "auto"},
    {"strict": True},
    {"cache_size": 5},
    {"keep_float32": ["aten.mm"]},
    {"matmul_precision": "high"},
    {"target": "v4"},
]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_an_option_without_effect_is_refused_by_name(a_graph, given):
    options = CompileOptions(lowering="stock", **given)
    with pytest.raises(TPUConfigurationError, match=f"option '{next(iter(given))}' has no effect with torch_xla 2.7.0"):
        compile_with_stock(*a_graph, options, "2.7.0")


def test_values_that_ask_for_nothing_are_accepted(a_graph):
    options = CompileOptions(lowering="stock", precision="float32", checkpoint="off", fuse=False, cache_size=100)
    assert compile_with_stock(*a_graph, options, "2.7.0")(*a_graph[1])[0].tolist() == [3, 3, 3]


def test_tensors_on_the_cpu_are_refused():
    """torch_xla's bridge would run them eagerly."""
    x = torch.ones(3)
    with pytest.raises(TPUDeviceError, match=r"torch_xla 2.7.0 only compiles tensors on the XLA device"):
        compile_with_stock(graph_of(lambda x: x + 1, x), [x], CompileOptions(lowering="stock"), "2.7.0")


def test_the_warning_lists_what_is_wrong_once(a_graph, caplog):
    earlier._warn.cache_clear()
    for _ in range(2):
        compile_with_stock(*a_graph, CompileOptions(lowering="stock"), "2.7.0")
    (record,) = [r for r in caplog.records if r.name == "kp_dynamo.legacy_backend"]
    assert record.levelname == "WARNING"
    assert all(limit.what in record.getMessage() for limit in EARLIER_LIMITS)


@on_home
def test_the_entry_point_uses_this_backend_on_an_earlier_version(monkeypatch, caplog):
    monkeypatch.setattr("kp_dynamo.backend.earlier_version", lambda: "2.6.0")
    earlier._warn.cache_clear()
    x = torch.ones(3, device=torch_xla.device())
    assert stock(lambda x: x * 3)(x).tolist() == [3, 3, 3]
    assert "torch_xla 2.6.0: lowering='stock'" in caplog.text


def test_the_native_tpu_device_is_named():
    class OnTpu:
        device, shape = torch.device("meta"), (2,)

    tensor = OnTpu()
    tensor.device = type("Device", (), {"type": "tpu", "__str__": lambda self: "tpu:0"})()
    tensor.dim = lambda: 1
    with pytest.raises(TPUDeviceError, match=r"is on tpu:0 .*, the native TPU device of PyTorch"):
        placement_mode([tensor], "cpu")


# What is known of the real ones.


def limit(words):
    (found,) = [known for known in EARLIER_LIMITS if words in known.what]
    return found


def losses_of_training(copy):
    torch._dynamo.reset()
    model = nn.Linear(2, 2, bias=False).to("xla")
    average = nn.Linear(2, 2, bias=False).to("xla")
    nn.init.ones_(model.weight)
    torch_xla.sync()
    copy(average, model)
    run, optimizer = stock(model), torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = run(torch.ones(1, 2, device="xla")).square().sum()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(round(loss.item(), 4))
    return losses


def losses_or_error(copy):
    """ "failed": torch_xla 2.5.1, where an equal program was compiled before."""
    try:
        return losses_of_training(copy)
    except RuntimeError as error:
        return "failed" if "handle->HasValue()" in str(error) else str(error)


@on_earlier
def test_stock_compiles_and_trains():
    assert losses_of_training(lambda average, model: None) == [8.0, 2.88, 1.0368]


@on_earlier
def test_a_copy_of_the_weights_freezes_training():
    assert "added to zero" in limit("Training freezes").cure
    assert losses_or_error(lambda average, model: average.load_state_dict(model.state_dict())) in ([8.0] * 3, "failed")

    def copy_of_values(average, model):
        average.load_state_dict({name: value + 0 for name, value in model.named_parameters()})

    assert losses_of_training(copy_of_values) == [8.0, 2.88, 1.0368]


@on_earlier
def test_dropout_scales_wrongly_when_compiled():
    assert "torch.compiler.disable" in limit("Dropout in training").cure
    for run, right in ((stock(lambda x: F.dropout(x, 0.1)), False), (lambda x: F.dropout(x, 0.1), True)):
        x = torch.ones(200, device="xla").requires_grad_()
        y = run(x)
        y.sum().backward()
        found = round(y.max().item(), 4), round(x.grad.max().item(), 4)
        assert found == ((1.1111, 1.1111) if right else (10.0, 11.1111))


@on_earlier
def test_batch_norm_keeps_the_biased_variance():
    assert limit("BatchNorm")
    norm = nn.BatchNorm1d(1, momentum=1.0).to("xla")
    stock(norm)(torch.tensor([[1.0], [2.0], [3.0]], device="xla"))
    assert round(norm.running_var.item(), 4) == 0.6667


@on_earlier
def test_only_torch_xlas_seed_repeats_random_numbers():
    assert "torch_xla.manual_seed" in limit("torch.manual_seed").cure
    run, x = stock(lambda x: x + torch.rand_like(x)), torch.zeros(3, device="xla")
    for seed, repeats in ((torch.manual_seed, False), (torch_xla.manual_seed, True)):
        drawn = []
        for _ in range(2):
            seed(0)
            drawn.append(run(x).tolist())
        assert (drawn[0] == drawn[1]) is repeats


@on_earlier
def test_moving_a_model_unties_it():
    assert limit("unties")
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.to("xla")
    assert model[0].weight is not model[1].weight


@on_earlier
def test_an_operator_without_a_lowering_runs_on_the_cpu():
    from torch_xla.debug import metrics

    assert limit("An operator without an XLA lowering")
    metrics.clear_all()
    stock(lambda x: torch.linalg.eigvals(x + 1))(torch.eye(3, device="xla"))
    assert "aten::linalg_eig" in metrics.counter_names()


FAILING = [
    ("x.detach()", "IndexError", lambda: stock(lambda x: (x.detach(), x + 1))(torch.ones(3, device="xla"))),
    ("dynamic=True", "layer_norm", lambda: stock(nn.LayerNorm(8).to("xla"), True)(torch.ones(3, 8).to("xla"))),
    (
        "torch.utils.checkpoint",
        "run_and_save_rng_state",
        lambda: stock(lambda x: checkpoint(lambda y: F.dropout(y, 0.5), x, use_reentrant=False))(
            torch.ones(3, device="xla", requires_grad=True)
        ),
    ),
]


@on_earlier
@pytest.mark.parametrize(("words", "message", "run"), FAILING, ids=[words for words, _, _ in FAILING])
def test_known_failures_of_earlier_versions_still_fail(words, message, run):
    assert limit(words)
    with pytest.raises((RuntimeError, IndexError, NotImplementedError)) as raised:
        run()
    assert message in f"{raised.type.__name__}: {raised.value}"
