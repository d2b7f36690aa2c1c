"""What a user may get wrong: each time our exception, our message first, and the next model compiles all the same."""

import itertools
import re
from dataclasses import dataclass, replace
from importlib import metadata
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from kp_dynamo import (
    PassReport,
    TPUConfigurationError,
    TPUDeviceError,
    TPUNotAvailableError,
    TPUOptimizationError,
    XLACompilationError,
)
from kp_dynamo.compat import importing, xla
from kp_dynamo.session import Session
from tests.spine import check_gradients_like_eager, check_like_eager, compiled, counted, run_script

NUMBERS = itertools.count(3)


@pytest.fixture(autouse=True)
def _the_next_model_compiles():
    """After each failure: a model that no cache knows."""
    yield
    torch._dynamo.reset()
    model, x = nn.Linear(next(NUMBERS), 2), None
    x = torch.ones(1, model.in_features, requires_grad=True)
    with counted() as counts:
        y = compiled(model)(x)
        y.sum().backward()
    assert counts.programs == 2
    torch.testing.assert_close(y, model(x))


def failure(error, call, *args):
    """The message of what torch wraps in BackendCompilerFailed; ours comes first in torch's, too."""
    with pytest.raises(BackendCompilerFailed) as raised:
        call(*args)
    inner = raised.value.inner_exception
    assert type(inner) is error
    assert str(raised.value).startswith(f"backend='kp_tpu' raised:\n{error.__name__}: {inner}")
    return str(inner)


def add(x):
    return (x + 1) * 2


X = torch.ones(2)

BAD_OPTIONS = [
    ({"levle": "balanced"}, "option 'levle' is unknown; did you mean 'level'? Allowed: level, precision, "),
    ({"zzz": 1}, "option 'zzz' is unknown. Allowed: level, precision, "),
    ({"level": "fast"}, "option level='fast' is invalid. Allowed: 'conservative', 'balanced', 'aggressive'. Try: "),
    ({"strict": 1}, "option strict=1 is invalid. Allowed: True, False. Try: correct it"),
    ({"cache_size": 0}, "option cache_size=0 is invalid. Allowed: an int >= 1. Try: correct it"),
    ({"cache_size": "9"}, "option cache_size='9' is invalid. Allowed: an int >= 1. Try: correct it"),
    ({"keep_float32": "aten.mm"}, "option keep_float32='aten.mm' is invalid: write ['aten.mm'], a list with one name"),
    ({"buckets": "pow3"}, "option buckets='pow3' is invalid. Allowed: 'pow2', an increasing list of ints >= 1"),
    (
        {"checkpoint": -0.1},
        "option checkpoint=-0.1 is invalid. Allowed: 'off', 'attention', 'blocks', 'auto', a number >= 0",
    ),
    (
        {"disable_passes": ["nonsense"]},
        "disable_passes=['nonsense'] is invalid: unknown pass. Allowed: cast_bf16, check_indices, checkpoint_attention",
    ),
    ({3: 4}, "option 3 is unknown"),
    ({"reduce_dtype": "float32"}, "option reduce_dtype='float32' is invalid. Allowed: 'bfloat16', None."),
    (
        {"reduce_dtype": "bfloat16", "precision": "float32"},
        "reduce_dtype='bfloat16' is invalid with precision='float32': the pass 'cast_bf16' rounds the gradients.",
    ),
    (
        {"reduce_dtype": "bfloat16", "disable_passes": ["cast_bf16"]},
        "reduce_dtype='bfloat16' is invalid with disable_passes=['cast_bf16']",
    ),
]


@pytest.mark.quick(
    "{'levle': 'balanced'}", "{'level': 'fast'}", "{'buckets': 'pow3'}", "{'disable_passes': ['nonsense'",
)  # fmt: skip
@pytest.mark.parametrize(("options", "beginning"), BAD_OPTIONS, ids=lambda value: str(value)[:30])
def test_options_that_are_wrong(options, beginning):
    run = torch.compile(add, backend="kp_tpu", options=options)
    assert failure(TPUConfigurationError, run, X).startswith(beginning)


@pytest.mark.quick("level=balanced", "7")
@pytest.mark.parametrize("options", ["level=balanced", ["level"], 7])
def test_options_that_are_no_dict(options):
    message = failure(TPUConfigurationError, torch.compile(add, backend="kp_tpu", options=options), X)
    assert re.match(r"options=.* is invalid\. Allowed: a dict such as", message, re.DOTALL)
    assert type(options).__name__ in message


def test_a_mode_of_inductor_s():
    message = failure(TPUConfigurationError, torch.compile(add, backend="kp_tpu", mode="max-autotune"), X)
    assert message.startswith("mode='max-autotune' is invalid: it is a mode of Inductor.")
    assert "Allowed: mode='default', 'reduce-overhead'." in message


@pytest.fixture
def pretend(monkeypatch):
    """Lets package metadata say something else; nothing remembers what it said."""

    def install(versions):
        def version(name):
            if versions.get(name, "") is None:
                raise metadata.PackageNotFoundError(name)
            return versions.get(name) or original(name)

        monkeypatch.setattr(metadata, "version", version)

    original = metadata.version
    importing.load.cache_clear()
    xla.device.cache_clear()
    yield install
    monkeypatch.undo()
    importing.load.cache_clear()
    xla.device.cache_clear()


def test_torch_xla_is_missing(pretend):
    pretend({"torch_xla": None})
    message = failure(TPUNotAvailableError, torch.compile(add, backend="kp_tpu"), X)
    assert message.startswith("torch_xla is not installed; kp_tpu needs torch and torch_xla, both 2.9.*")
    assert message.endswith('cure: pip install "torch==2.9.*" "torch_xla==2.9.*"')


def test_torch_xla_does_not_fit_torch(pretend):
    pretend({"torch_xla": "2.8.1"})
    message = failure(TPUConfigurationError, torch.compile(add, backend="kp_tpu"), X)
    assert "torch_xla 2.8.1 are of different minor versions; both must be 2.9.*" in message
    assert message.endswith('cure: pip install "torch==2.9.*" "torch_xla==2.9.*"')


NO_DEVICE = """
import torch
run = torch.compile(lambda x: x + 1, backend="kp_tpu")
for _ in range(2):
    try:
        run(torch.ones(2))
    except Exception as error:
        print(type(error.inner_exception).__name__, error.inner_exception)
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist())
"""


def test_no_such_device():
    first, second, eager = run_script(NO_DEVICE, {"PJRT_DEVICE": "ABACUS"}).splitlines()
    assert first.startswith("TPUDeviceError no XLA device: PJRT_DEVICE='ABACUS' could not be started")
    assert first.endswith("Try: set PJRT_DEVICE=CPU.")
    assert second == first
    assert eager == "[2.0, 2.0]"


LIBRARY = torch.library.Library("kp_bad_input", "FRAGMENT")
LIBRARY.define("nowhere(Tensor x) -> Tensor")
LIBRARY.impl("nowhere", lambda x: torch.empty_like(x), "Meta")


def calls_nowhere(x):
    return torch.ops.kp_bad_input.nowhere(x * 2)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_an_operator_that_nothing_can_run(device):
    message = failure(XLACompilationError, compiled(calls_nowhere), X.to(device))
    line = f"{__file__}:{calls_nowhere.__code__.co_firstlineno + 1} in calls_nowhere"
    assert message.startswith(f"kp_bad_input.nowhere.default can run neither on XLA nor on the CPU (at {line}). ")
    assert "Try: register a CPU kernel" in message


def positions(x):
    return torch.nonzero(x) + 1


def test_a_shape_that_depends_on_data():
    # By itself Dynamo breaks the graph there, and the rest is compiled.
    assert compiled(positions)(torch.tensor([0, 1, 1])).tolist() == [[2], [3]]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        message = failure(XLACompilationError, compiled(positions), torch.tensor([0, 1, 1]))
    assert message.startswith("a shape or a branch depends on the value of a tensor, but a compiled program has fixed ")
    assert "aten.nonzero.default" in message
    assert f'"{__file__}", line {positions.__code__.co_firstlineno + 1}, in positions' in message
    assert message.endswith("(torch.compiler.disable), or use a mask or a fixed size.")


def write_at(cache, pos):
    cache[:, pos] += 1
    return cache * 2


def read_at(x, pos):
    return x.sin()[pos] * 2


@pytest.mark.parametrize("fn", [write_at, read_at])
def test_a_0_dim_index_breaks_the_graph_and_leaves_no_trace(fn):
    """Dynamo runs the function eagerly where a backend says that a value is needed."""
    session, run = Session(), compiled(fn)
    with counted() as counts, mock.patch("kp_dynamo.session.SESSION", session):
        for place in (0, 2):
            x, y = torch.arange(9.0).view(3, 3), torch.arange(9.0).view(3, 3)
            assert torch.equal(run(x, torch.tensor(place)), fn(y, torch.tensor(place)))
            assert torch.equal(x, y)
    assert (counts.graphs, counts.programs) == (0, 0)
    labels = []
    session.runtime = replace(session.runtime, observe=lambda event: labels.append(getattr(event, "number", None)))
    with mock.patch("kp_dynamo.session.SESSION", session):
        compiled(torch.sin)(X)
    assert 1 in labels  # the first number is still free


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks, behind the break
def test_gradients_of_a_0_dim_index():
    place = torch.tensor(1)
    check_gradients_like_eager(
        lambda x, w: read_at(x * w, place), torch.randn(3, 2, requires_grad=True), torch.randn(3, 2)
    )


@pytest.mark.parametrize(
    ("fn", "remedy"), [(write_at, "x.index_add_, or use a mask."), (read_at, "pos.view(1)).squeeze(dim)")]
)
def test_a_0_dim_index_is_refused_with_a_remedy_where_strict_is_asked_for(fn, remedy):
    message = failure(XLACompilationError, compiled(fn, strict=True), torch.ones(3, 3), torch.tensor(1))
    assert f'"{__file__}", line {fn.__code__.co_firstlineno + 1}, in {fn.__name__}' in message
    assert remedy in message
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(remedy)):
        compiled(fn, fullgraph=True)(torch.ones(3, 3), torch.tensor(1))


def write_by_copy(cache, value, pos):
    cache.index_copy_(1, pos.view(1), value.unsqueeze(1))
    cache.index_add_(1, pos.view(1), value.unsqueeze(1))
    return cache.index_select(1, pos.view(1)).squeeze(1) * 2


def test_the_remedy_for_a_0_dim_index_is_one_graph():
    run = compiled(write_by_copy, fullgraph=True, strict=True)
    for place in (0, 2):
        x, y, value = torch.zeros(3, 3), torch.zeros(3, 3), torch.ones(3)
        assert torch.equal(run(x, value, torch.tensor(place)), write_by_copy(y, value, torch.tensor(place)))
        assert torch.equal(x, y)


def replace_data(p, x):
    y = p * x
    p.data = p.data * 0.5
    return (p * x + y).sum()


def write_data(p, x):
    y = p.detach() * x
    p.data.mul_(0.5)
    x.data.copy_(y)
    return (p * x).sum()


@pytest.mark.quick("True")
@pytest.mark.parametrize("fn", [replace_data, write_data])
@pytest.mark.parametrize("wants_grad", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_data_that_is_replaced_or_written(fn, wants_grad):
    p, x = torch.arange(3.0).requires_grad_(wants_grad), torch.ones(3)
    check_like_eager(fn, p, x)
    if wants_grad:
        check_gradients_like_eager(fn, p, x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_data_that_is_replaced_is_refused_where_strict_is_asked_for(dynamic):
    message = failure(XLACompilationError, compiled(replace_data, strict=True, dynamic=dynamic), X, X)
    line = f"{__file__}:{replace_data.__code__.co_firstlineno + 2} in replace_data"
    assert f"by an assignment to .data or by set_ (at {line}), but a compiled program only writes" in message
    assert "Allowed: x.data.copy_(value), x.data.mul_(0.5)." in message


def overwrite_what_is_saved(x):
    y = x.exp()
    y.mul_(2)
    return y.sum()


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (overwrite_what_is_saved, "has been modified by an inplace operation"),
        (lambda x: torch.nextafter(x, x * 2).sum(), "NotImplementedError: the derivative for 'nextafter' is not impl"),
    ],
)
def test_what_eager_cannot_differentiate_either(fn, reason):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises((RuntimeError, NotImplementedError)):
        fn(x).backward()
    message = failure(XLACompilationError, compiled(fn), x)
    assert reason in message
    assert message.endswith(". Eager may raise this as well, perhaps only in the backward. Try: run it eagerly and "
                            "fix the function.")  # fmt: skip
    assert "torch.compiler.disable" not in message


def test_a_value_that_depends_on_data_is_fetched():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert compiled(lambda x: x * x.sum().item())(X).tolist() == [2, 2]


class HalfThere(nn.Module):
    """Two layers that never meet, so that Dynamo has nothing against them."""

    def __init__(self, other):
        super().__init__()
        self.here, self.there = nn.Linear(2, 2), nn.Linear(2, 2).to(other)

    def forward(self, x):
        return self.here(x), self.there.weight * 2


def test_a_model_half_on_the_cpu():
    message = failure(TPUDeviceError, compiled(HalfThere("xla")), torch.ones(1, 2))
    assert message.startswith("1 graph inputs are on xla:0 (there.weight) and 3 on the CPU (")
    assert "here.weight" in message
    assert "x" in re.split(r"\W+", message)
    assert message.endswith("Try: move model and inputs with .to('xla').")


def test_a_model_half_on_meta():
    message = failure(TPUDeviceError, compiled(HalfThere("meta")), torch.ones(1, 2))
    assert message.startswith("a graph input is on meta (shape (2, 2)). Allowed: all on the CPU, or all on the XLA")


class Named(nn.Module):
    """Two layers, the second of which meets what the first returns."""

    def __init__(self, first, second):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2).to(first), nn.Linear(2, 2).to(second)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


IN_A_LAYER = {
    "input": (
        "xla",
        "xla",
        "cpu",
        "linear in layers.0 (Linear) are on two devices: x is on cpu, layers.0.weight is on",
    ),
    "model": (
        "cpu",
        "cpu",
        "xla",
        "linear in layers.0 (Linear) are on two devices: x is on xla:0, layers.0.weight is on",
    ),
    "layer": (
        "cpu",
        "xla",
        "cpu",
        "linear in layers.1 (Linear) are on two devices: relu is on cpu, layers.1.weight is on",
    ),
}


@pytest.mark.quick("input-True", "model-False", "layer-True")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("what", IN_A_LAYER)
def test_a_model_on_another_device_than_its_input(what, train):
    # Dynamo is first: it stops before it calls the backend.
    first, second, device, expected = IN_A_LAYER[what]
    run = compiled(Named(first, second).train(train))
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as raised:
        run(torch.ones(1, 2, device=device))
    message = str(raised.value)
    assert message.startswith(f"the operands of {expected}")
    assert "Try: move the inputs with .to('xla'), or the model with .to('cpu')." in message


def test_another_backend_keeps_torch_s_own_message():
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="found two different devices cpu, xla:0"):
        torch.compile(nn.Linear(2, 2).to("xla"), backend="eager")(torch.ones(1, 2))


@dataclass(frozen=True)
class Broken:
    """A pass that fails in a way of its choice."""

    how: str
    name: str = "broken"

    def __call__(self, gm):
        if self.how == "raises":
            raise KeyError("no such node")
        if self.how == "returns nothing":
            return None
        if self.how == "breaks the graph":
            first, second, *_ = (n for n in gm.graph.nodes if n.op == "call_function")
            first.args = (second, *first.args[1:])
        if self.how == "falls back":
            raise torch._subclasses.fake_tensor.DynamicOutputShapeException("aten.nonzero.default")
        return PassReport("broken", 1, (("add", "a reason"),))


HOWS = {
    "raises": "KeyError: 'no such node'",
    "returns nothing": "TypeError: the pass returned NoneType, expected a PassReport",
    "breaks the graph": "RuntimeError: Argument 'mul' of Node 'add' was used before it has been defined!",
    "falls back": "DynamicOutputShapeException: aten.nonzero.default",
}


@pytest.mark.quick("inference-raises", "training-returns nothing", "training-breaks the graph", "inference-falls back")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("x", [X, X.clone().requires_grad_()], ids=["inference", "training"])
def test_a_pass_that_fails_is_named_with_those_before_it(how, x):
    run = compiled(add, extra_passes=[Broken(how)], level="conservative")
    message = failure(TPUOptimizationError, run, x)
    assert message.startswith(f"pass 'broken' failed, run after fold_constants, recompute_casts: {HOWS[how]}")
    assert message.endswith("""Disable it with options={"disable_passes": ["broken"]}.""")
    assert torch.equal(compiled(add, extra_passes=[Broken(how)], disable_passes=["broken"])(x), add(x))


def test_a_refusal_where_strict_is_asked_for():
    message = failure(TPUOptimizationError, compiled(add, extra_passes=[Broken("refuses")], strict=True), X)
    assert message.startswith("strict=True and passes refused 1 match(es). broken refused add: a reason. ")


def test_a_dump_folder_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    message = failure(TPUConfigurationError, compiled(add, dump_dir=file / "graphs"), X)
    assert message.startswith(f"dump_dir={str(file / 'graphs')!r} is invalid: Not a directory. ")
    assert message.endswith("Allowed: a folder that this user can write to.")


def test_an_error_while_the_program_is_compiled_for_new_shapes(monkeypatch):
    run = compiled(lambda x: x * 3.5, dynamic=True)
    run(torch.ones(2, 3))

    def fail(*_):
        raise RuntimeError("out of everything")

    with monkeypatch.context() as patch:
        patch.setattr("kp_dynamo.lowering.openxla.compile_program", fail)
        with pytest.raises(XLACompilationError, match=r"could not be compiled: RuntimeError: out of everything\. "):
            run(torch.ones(4, 3))
    assert run(torch.ones(4, 3)).shape == (4, 3)
    assert run(torch.ones(2, 3)).tolist() == [[3.5] * 3] * 2


def test_the_message_survives_suppression():
    # torch then runs the model eagerly, which is what the user asked for.
    with torch._dynamo.config.patch(suppress_errors=True):
        assert torch.compile(add, backend="kp_tpu", options={"zzz": 1})(X).tolist() == [4, 4]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda n: setattr(n, "args", n.args[:1]), "on fake tensors failed"),
        (lambda n: n.meta.update(val=n.meta["val"].to(torch.float64)), r"but its meta\['val'\] is"),
        (lambda n: _returns_twice(n.graph), "number of its"),
    ],
)
def test_a_pass_that_leaves_a_wrong_graph_is_named(spoil, message):
    @dataclass(frozen=True)
    class Spoiler:
        name: str = "spoiler"

        def __call__(self, gm):
            spoil(next(n for n in gm.graph.nodes if n.op == "call_function"))
            return PassReport(self.name, 1)

    with pytest.raises(BackendCompilerFailed, match=message) as raised:
        torch.compile(lambda x, y: x * y, backend="kp_tpu", options={"extra_passes": [Spoiler()]})(
            torch.ones(3), torch.ones(3)
        )
    assert "pass 'spoiler' failed" in str(raised.value)


def _returns_twice(graph):
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = ((*output.args[0], *output.args[0]),)


@pytest.mark.parametrize(
    "call",
    [
        'torch.compile(refused, backend="kp_tpu")(torch.ones(4))',
        pytest.param("failing_in_xla(torch.ones(31))", marks=pytest.mark.slow),
        pytest.param("kp_dynamo.aot_compile(refused, (torch.ones(4),))", marks=pytest.mark.slow),
    ],
)
def test_an_error_that_is_kept_ends_no_later_work(call):
    """It holds the frames it came through, and torch_xla's sync() ends a process in which a placeholder is alive."""
    source = f"""
import torch, torch_xla, kp_dynamo
def refused(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
def failing_in_xla(x):
    torch_xla._XLAC._xla_warm_up_cache = lambda *args: 1 / 0
    try:
        torch.compile(torch.sin, backend="kp_tpu")(x)
    finally:
        torch_xla._XLAC._xla_warm_up_cache = warm_up
warm_up = torch_xla._XLAC._xla_warm_up_cache
try:
    {call}
except Exception as error:
    kept = error
y = torch.ones(2, device="xla") + 1
torch_xla.sync()
print(type(kept).__name__, y.tolist())
"""
    assert run_script(source).endswith("[2.0, 2.0]\n")


def test_the_gradient_of_a_value_that_is_filled_in_is_refused():
    """It is a sum over the different indices, of which torch traces one."""
    run, value = compiled(lambda x, index, value: x.index_fill(1, index, value)), torch.tensor(2.0)
    x, index = torch.ones(2, 5), torch.tensor([4, 3, 3])
    assert run(x, index, value).tolist() == [[1, 1, 1, 2, 2]] * 2
    with pytest.raises(BackendCompilerFailed, match=r"distinct indices.*Allowed: torch\.where"):
        run(x, index, value.requires_grad_())


def test_a_nested_tensor():
    rows = torch.nested.nested_tensor([torch.ones(4, 3), torch.ones(2, 3)], layout=torch.jagged)
    with pytest.raises(BackendCompilerFailed, match="an input is a nested tensor") as raised:
        compiled(torch.sin)(rows)
    assert isinstance(raised.value.inner_exception, XLACompilationError)


def test_a_nested_tensor_that_the_graph_makes():
    def ragged(x):
        return torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged).values() * 2

    with pytest.raises(BackendCompilerFailed, match=r"is a nested tensor \(.*test_bad_input.py.*Try") as raised:
        compiled(ragged)(torch.ones(3, 2))
    assert isinstance(raised.value.inner_exception, XLACompilationError)
