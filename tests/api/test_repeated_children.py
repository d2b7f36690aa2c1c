"""Repeated children of a model of the object API: Dynamo captures one in inference, and the model is as it was."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kp_dynamo import TPUConfig, XLACompiler, XLAOptimizations, clear_cache, compile_blocks, explain
from kp_dynamo.blocks.borrowed_forwards import BorrowedForward, Borrowing
from kp_dynamo.blocks.child_modules import repeated_children
from tests.blocks import stacks
from tests.blocks.test_compile_blocks import CASES, Scaled
from tests.spine import DEVICES, counted, on

X = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
# Three captures of a stack: the layer, and what stands before and after the calls.
FEW = 3


@pytest.fixture(autouse=True)
def _nothing_of_other_tests():
    clear_cache()
    torch._dynamo.reset()


def compiled_of(model, blocks="on", **fields):
    """By default, the children of these small models would not pay."""
    XLAOptimizations(TPUConfig()).add_compilation_hints(model, blocks=blocks)
    return XLACompiler(TPUConfig(**{"precision": "float32", **fields})).compile_model(model)


def state_of(model):
    """What of a module a borrowed forward could change."""
    return [(name, vars(part).get("forward"), len(part.state_dict())) for name, part in model.named_modules()]


def assert_same(compiled, model, *args, device="cpu"):
    before = state_of(model)
    with torch.no_grad():
        found = compiled(*on(device, args))
        assert state_of(model) == before
        expected = copy.deepcopy(model).cpu()(*args)
    torch.testing.assert_close(on("cpu", found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_several_calls(device):
    model = stacks.Stack(6).to(device)
    before = state_of(model)
    compiled = compiled_of(model)
    assert state_of(model) == before
    with counted() as count:
        for _ in range(3):
            assert_same(compiled, model, X, device=device)
    assert count["aot_traces"] == FEW
    assert compiled._orig_mod is model
    assert isinstance(compiled, torch._dynamo.OptimizedModule)


def test_a_copy_of_a_compiled_model():
    """Its children hold the forward of their class."""
    model = copy.deepcopy(compile_blocks(stacks.Stack(4)))
    borrowing = Borrowing(repeated_children(model), lambda forward: forward)
    borrowing.begin(borrows=True)
    assert all(isinstance(layer.forward, BorrowedForward) for layer in model.layers)
    borrowing.end()
    assert not any("forward" in vars(layer) for layer in model.layers)


def test_depth_adds_no_captures():
    def captures(depth):
        clear_cache()
        torch._dynamo.reset()
        with counted() as count, torch.no_grad():
            compiled_of(stacks.Stack(depth))(X)
        return count["aot_traces"], count["programs"]

    assert captures(3) == captures(9) == (FEW, FEW)


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", DEVICES)
def test_training_captures_the_whole_model_and_alternates_with_inference(device):
    model = stacks.Stack(4).to(device)
    compiled, eager = compiled_of(model), copy.deepcopy(model).cpu()
    for _ in range(2):
        for one, x in ((compiled, X.to(device)), (eager, X)):
            one(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-5)
        assert_same(compiled, model, X, device=device)
    assert not any("forward" in vars(part) for part in model.modules())


@pytest.mark.quick("returns an argument-xla", "graph break-xla", "writes to an argument-xla")
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), "xla"])
@pytest.mark.parametrize("name", ["stores", "returns an argument", "nested", "graph break", "writes to an argument"])
def test_whatever_children_do(name, device):
    model = CASES[name]().to(device)
    compiled = compiled_of(model)
    for length in (5, 5, 7):
        assert_same(compiled, model, torch.randn(2, length, 3), device=device)


def test_changes_of_the_model_are_seen():
    model = stacks.Stack(4, lambda: stacks.Layer(0.5)).eval()
    compiled = compiled_of(model)
    assert_same(compiled, model, X)
    with torch.no_grad():
        model.layers[2].up.weight.mul_(2)
    assert_same(compiled, model, X)
    model.layers[1].up.weight = nn.Parameter(torch.randn(16, stacks.WIDTH))
    assert_same(compiled, model, X)
    # Numbers of the size that layers begin with: larger ones cancel, and one rounding shows.
    model.load_state_dict(stacks.Stack(4, lambda: stacks.Layer(0.5)).state_dict())
    assert_same(compiled, model, X)
    model.layers[3].requires_grad_(False)
    assert_same(compiled, model, X)
    model.layers[1] = stacks.Layer()
    assert_same(compiled, model, X)
    model.layers.append(stacks.Layer().eval())
    assert_same(compiled, model, X)
    with torch.no_grad():
        model.train()
        assert not torch.equal(compiled(X), compiled(X))
        model.layers[1].dropout = 0.0
    model.eval()
    assert_same(compiled, model, X)


def test_attributes_of_single_children_are_seen():
    model = stacks.Stack(4, Scaled)
    compiled = compiled_of(model)
    for number, scale in ((0, 0.5), (2, 2.0), (2, 1.0)):
        model.layers[number].scale = scale
        assert_same(compiled, model, X)


def test_more_different_children_than_dynamo_compiles_by_default():
    model = stacks.Stack(12, Scaled)
    for number, layer in enumerate(model.layers):
        layer.scale = 1 / (number + 1)
    compiled = compiled_of(model)
    with counted() as count:
        assert_same(compiled, model, X)
    assert count["aot_traces"] == 14  # none runs eagerly
    with counted() as count:
        assert_same(compiled, model, X)
    assert count["graphs"] == 0


class Reducing(stacks.Layer):
    reduces = False

    def forward(self, x):
        x = super().forward(x)
        return x.mean(1, keepdim=True) if self.reduces else x


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_child_that_returns_something_else(is_late):
    model = stacks.Stack(3, Reducing)
    compiled = compiled_of(model)
    if is_late:
        assert_same(compiled, model, X)
    model.layers[1].reduces = True
    assert_same(compiled, model, X)
    assert_same(compiled, model, X)


class Writing(stacks.Stack):
    """Writes to its argument, and counts in a buffer."""

    def __init__(self, num_layers, of):
        super().__init__(num_layers, of)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        x.add_(1)
        return super().forward(x)


def test_what_a_call_wrote_is_not_written_twice():
    model = Writing(3, Reducing).eval()
    compiled, x = compiled_of(model), torch.zeros(2, 5, 3)
    with torch.no_grad():
        compiled(x)
        model.layers[1].reduces = True
        with pytest.raises(Exception, match="returned something else"):
            compiled(x)
        assert (float(x.mean()), float(model.steps)) == (2, 2)
        compiled(x)
        assert (float(x.mean()), float(model.steps)) == (3, 3)


class Sometimes(stacks.Layer):
    """Changes an object if it is told to."""

    notes = None

    def forward(self, x):
        if self.notes is not None:
            self.notes.append(x.sum())
        return super().forward(x)


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_child_that_changes_objects_unlike_the_others(is_late):
    model, notes = stacks.Stack(4, Sometimes), []
    compiled = compiled_of(model)
    if is_late:
        assert_same(compiled, model, X)
    model.layers[2].notes = notes
    for number in range(2):
        with torch.no_grad():
            compiled(X)
        assert len(notes) == number + 1


class Failing(stacks.Layer):
    fails = False

    def forward(self, x):
        if self.fails:
            torch._dynamo.graph_break()
            raise ZeroDivisionError
        return super().forward(x)


def test_a_call_that_raises_gives_the_forwards_back():
    model = stacks.Stack(4, Failing)
    compiled, before = compiled_of(model), state_of(model)
    model.layers[2].fails = True
    for x in (X, torch.randn(2, 4)):
        with torch.no_grad(), pytest.raises(Exception):  # noqa: B017, PT011 - whatever Dynamo makes of it
            compiled(x)
        model.layers[2].fails = False
        assert state_of(model) == before
    assert_same(compiled, model, X)


class Copying(stacks.Layer):
    """Copies the whole model during a call."""

    model, copies = None, None

    def forward(self, x):
        if self.copies is not None:
            self._copy()
        return super().forward(x)

    @torch._dynamo.disable
    def _copy(self):
        copies, self.copies = self.copies, None
        copies += [copy.deepcopy(self.model[0]), pickle.loads(pickle.dumps(self.model[0]))]


def test_copies_during_and_after_a_call():
    model, copies = stacks.Stack(3, Copying), []
    compiled = compiled_of(model)
    model.layers[1].model, model.layers[1].copies = [model], copies
    with torch.no_grad():
        compiled(X)
    assert len(copies) == 2
    for other in (*copies, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.layers[0].up.weight.data.zero_()
        assert not torch.equal(other(X), model(X))
    assert not any("forward" in vars(part) for part in copy.deepcopy(model).modules())


def test_threads():
    model = stacks.Stack(4)
    compiled, expected, found = compiled_of(model), model(X).detach(), []

    def call(run):
        for _ in range(20):
            with torch.no_grad():
                found.append(run(X))

    threads = [threading.Thread(target=call, args=(run,)) for run in (compiled, compiled, model)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    torch.testing.assert_close(found, [expected] * 60, rtol=1e-4, atol=1e-5)
    assert not any("forward" in vars(part) for part in model.modules())


def test_two_compilations_of_one_model_in_threads():
    model, problems = stacks.Stack(4), []
    compiled = [compiled_of(model), compiled_of(model, xla_optimization_level=0)]

    def call(run):
        try:
            for number in range(30):
                with torch.no_grad():
                    x = torch.randn(2, 5 + number % 3, 3)
                    torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-4)
        except Exception as problem:  # noqa: BLE001 - shown by the main thread
            problems.append(problem)

    threads = [threading.Thread(target=call, args=(compiled[number % 2],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert not any("forward" in vars(part) for part in model.modules())


def test_two_compilations_of_one_model_and_compile_blocks():
    model = stacks.Stack(4)
    first, second = compiled_of(model), compiled_of(model, xla_optimization_level=0)
    for _ in range(2):
        assert_same(first, model, X)
        assert_same(second, model, X)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager")(X), model(X))
        torch.testing.assert_close(torch.compile(first, backend="aot_eager")(X), model(X))
        expected = model(X)
        compile_blocks(model, options={"precision": "float32"})
        torch.testing.assert_close([model(X), first(X)], [expected] * 2, rtol=1e-4, atol=1e-5)


def test_a_compiled_model_inside_another():
    inner = stacks.Unembedded(3)
    inner.head = nn.Linear(stacks.WIDTH, stacks.WIDTH)
    outer = stacks.Stack(3, lambda: copy.deepcopy(inner))
    outer.layers.append(compiled_of(inner))
    compiled = compiled_of(outer)
    expected = copy.deepcopy(outer)
    expected.layers[-1] = inner
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(X), expected(X), rtol=1e-4, atol=1e-5)
    assert not any("forward" in vars(part) for part in inner.modules())


class Checkpointed(stacks.Stack):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def test_checkpoint_runs_children_as_they_are():
    model = Checkpointed(3)
    compiled = compiled_of(model)
    assert_same(compiled, model, X)
    compiled(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_hooks_of_children_and_inside():
    model, order = stacks.Stack(4), []
    for number, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda *_, number=number: order.append(number))
    model.layers[1].up.register_forward_hook(lambda m, a, out: out * 2)
    compiled = compiled_of(model)
    with torch.no_grad():
        expected = model(X)
        del order[:]
        torch.testing.assert_close(compiled(X), expected, rtol=1e-4, atol=1e-5)
    assert order == [0, 1, 2, 3]


class Positioned(stacks.Layer):
    def forward(self, x, position):
        return super().forward(x) + position


class WithPositions(stacks.Stack):
    def forward(self, x, position):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(x)


@pytest.mark.parametrize("is_dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_numbers_and_lengths_that_vary(is_dynamic):
    model = WithPositions(4, Positioned)
    compiled = compiled_of(model, enable_xla_dynamic_shapes=is_dynamic)
    # Importing torch_xla, as other tests do, turns this off.
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        for number in range(1, 5):
            assert_same(compiled, model, X, number)
        for lengths in ((6, 7), (8, 9)):
            with counted() as count:
                for length in lengths:
                    assert_same(compiled, model, torch.randn(2, length, 3), 1)
    assert is_dynamic is (count["aot_traces"] == 0)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize(("depth", "captures"), [(2, 1), (5, 1 + 1)])
def test_layers_of_which_each_is_work_for_the_device(depth, captures):
    model = nn.Sequential(*(Wide() for _ in range(depth)), nn.Linear(512, 8))
    compiled = compiled_of(model, "auto")
    for _ in range(2):
        with counted() as count:
            assert_same(compiled, model, torch.randn(16, 512))
        assert count["aot_traces"] == captures
        captures = 0


def test_small_layers_stay_in_one_graph_without_a_warning(caplog):
    model = stacks.Stack(6)
    compiled = compiled_of(model, "auto", enable_strict_validation=True)
    with counted() as count:
        assert_same(compiled, model, X)
    assert count["aot_traces"] == 1
    assert not any("effect" in record.message for record in caplog.records)


@pytest.mark.parametrize("hint", [{"blocks": "off"}, {"keep_float32": ["layers.0"]}])
def test_what_keeps_the_whole_model(hint):
    model = stacks.Stack(6)
    XLAOptimizations(TPUConfig()).add_compilation_hints(model, **hint)
    compiled = compiled_of(model, **{"blocks": "on", **{k: v for k, v in hint.items() if k == "blocks"}})
    with counted() as count, torch.no_grad():
        compiled(X)
    assert count["aot_traces"] == 1


def test_explain_and_statistics():
    model = stacks.Stack(6)
    XLAOptimizations(TPUConfig()).add_compilation_hints(model, blocks="on")
    kernel = XLACompiler(TPUConfig(precision="float32"))
    with torch.no_grad():
        compiled = kernel.compile_model(model, X)
        assert kernel.compile_model(model, X) is compiled
        assert kernel.benchmark_compilation(model, X, num_runs=1)["min_time"] > 0
        assert len(explain(compiled, X).captures) == 1
    assert kernel.get_compilation_stats()["total_compiled_models"] == 1


def test_models_are_freed():
    model = stacks.Stack(4)
    compiled = compiled_of(model)
    with torch.no_grad():
        compiled(X)
    gone = [weakref.ref(model), weakref.ref(model.layers[1])]
    del model, compiled
    torch._dynamo.reset()
    clear_cache()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_functional_call_and_inference_mode():
    model = stacks.Stack(4)
    compiled = compiled_of(model)
    other = {f"_orig_mod.{name}": torch.randn_like(p) for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, {n.removeprefix("_orig_mod."): p for n, p in other.items()}, X)
        found = torch.func.functional_call(compiled, other, X)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-5)
