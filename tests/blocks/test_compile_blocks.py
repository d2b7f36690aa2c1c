"""`compile_blocks`: repeated child modules compiled by themselves, captured once, right whatever they do."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslatorBase

from kp_dynamo import clear_cache, compile_blocks, explain
from kp_dynamo.blocks.block_calls import BlockForward
from kp_dynamo.blocks.child_modules import has_own_forward
from kp_dynamo.exceptions import TPUConfigurationError
from tests.blocks import stacks
from tests.blocks.test_divided_models import MODELS, assert_alike, distances, flat, named, step
from tests.spine import DEVICES, counted, on

# torch hides this warning about inputs that are results of operators, but not from a filter that raises.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
FLOAT32 = {"precision": "float32"}
QUICK = ("plain", "u-net", "in place")
WAYS = [
    pytest.param(name, trains, marks=[] if trains and name in QUICK else pytest.mark.slow)
    for name in MODELS
    for trains in (False, True)
    if (name, trains) != ("caches", True)
]


def mine_of(eager, device="cpu", **options):
    return compile_blocks(copy.deepcopy(eager).to(device), options={**FLOAT32, **options})


def assert_equal_steps(eager, mine, *args, device="cpu", trains=True):
    results = [step(model, on(at, args), trains=trains) for model, at in ((mine, device), (eager, "cpu"))]
    got, wanted = ((r[0], named(r[1]), named(r[2])) for r in results)
    assert_alike(got, wanted)
    assert max(distances(got, wanted)) < 1e-5
    for model in (mine, eager):
        model.zero_grad()


@pytest.mark.quick("plain-True-cpu", "u-net-True-xla", "in place-True-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "trains"), WAYS)
def test_as_eager(name, device, trains):
    make, arguments, _ = MODELS[name]
    eager = make().train(trains)
    mine = mine_of(eager, device)
    for _ in range(2):
        assert_equal_steps(eager, mine, *arguments(), device=device, trains=trains)


@pytest.mark.parametrize("trains", [False, True])
def test_depth_adds_no_captures(trains):
    def captures(depth):
        clear_cache()
        torch._dynamo.reset()
        model = compile_blocks(stacks.Stack(depth), options=FLOAT32)
        with counted() as count:
            step(model, [torch.randn(2, 5, 3)], trains=trains)
        return count["aot_traces"], count["programs"]

    assert captures(3) == captures(9) == (3, 6 if trains else 3)


def test_dynamo_traces_little_for_a_child_that_it_does_not_follow(monkeypatch):
    """113 instructions in torch's two functions and in ours; a function of ours more, inlined, has some 15 to 30."""
    traced, step_of_dynamo = [], InstructionTranslatorBase.step
    monkeypatch.setattr(InstructionTranslatorBase, "step", lambda self: (traced.append(1), step_of_dynamo(self))[1])

    def instructions(depth):
        traced.clear()
        torch._dynamo.reset()
        with torch.no_grad():
            compile_blocks(stacks.Stack(depth), options=FLOAT32)(torch.randn(2, 5, 3))
        return len(traced)

    assert 0 < instructions(6) - instructions(4) < 2 * 150


def test_the_model_is_what_it_was():
    eager = stacks.Stack(4)
    mine = mine_of(eager)
    assert mine.state_dict().keys() == eager.state_dict().keys()
    assert [n for n, _ in mine.named_modules()] == [n for n, _ in eager.named_modules()]
    assert inspect.signature(mine.layers[0].forward) == inspect.signature(eager.layers[0].forward)
    x = torch.randn(2, 5, 3)
    expected = mine(x)
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), copy.deepcopy(copy.deepcopy(mine))):
        with counted() as count:
            torch.testing.assert_close(other(x), expected)
        assert count["graphs"] == 0  # a copy is not compiled
        assert other.layers[1].forward.__self__ is other.layers[1]
        assert not any(map(has_own_forward, other.modules()))
        compile_blocks(other, options=FLOAT32)
        assert isinstance(vars(other.layers[1])["forward"], BlockForward)


@pytest.mark.slow
def test_a_module_of_torch_is_compiled_as_a_whole():
    """Dynamo skips a forward of torch's own."""
    clear_cache()  # other tests compile the same graphs
    eager = nn.Sequential(nn.Linear(3, stacks.WIDTH), *[stacks.Layer() for _ in range(3)], nn.Linear(stacks.WIDTH, 2))
    mine, x = mine_of(eager), torch.randn(2, 5, 3)
    with counted() as count, torch.no_grad():
        torch.testing.assert_close(mine(x), eager(x), rtol=1e-4, atol=1e-5)
    assert count["aot_traces"] == 3  # the layer, and what stands before and after


def test_a_child_alone_is_compiled():
    eager = stacks.Stack(4)
    mine, x = mine_of(eager), torch.randn(2, 5, 8)
    with counted() as count:
        torch.testing.assert_close([mine.layers[i](x) for i in range(4)], [eager.layers[i](x) for i in range(4)])
    assert count["aot_traces"] == 1


class Noting(stacks.Layer):
    """Stores what the model reads, as the losses of experts."""

    def forward(self, x):
        self.loss = x.square().mean()
        return super().forward(x)


class WithLosses(stacks.Stack):
    def forward(self, x):
        return super().forward(x) + sum(layer.loss for layer in self.layers)


class Doubling(stacks.Layer):
    """Writes to its argument."""

    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class PassingOn(stacks.Layer):
    """Returns an argument, which then has two names."""

    def forward(self, x, state):
        return super().forward(x) + state.mean(), state


class WithState(stacks.Stack):
    def forward(self, x):
        x = self.embed(x)
        state = x * 3
        for layer in self.layers:
            x, state = layer(x, state)
        state.add_(1)
        return self.head(x + state)


class Named(stacks.Layer):
    """Constants, nested results and keyword arguments."""

    def forward(self, x, *, scale, masks):
        return {"x": super().forward(x) * scale * masks[0]["mask"], "more": [None, (x + 1, 3)], "word": "tanh"}


class WithNames(stacks.Stack):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            out = layer(x, scale=0.5, masks=[{"mask": torch.ones_like(x)}])
            x = getattr(torch, out["word"])(out["x"]) + out["more"][1][0] * out["more"][1][1]
        return self.head(x)


class Nested(stacks.Layer):
    """Nested results."""

    def forward(self, x, *, scale, masks):
        return super().forward(x) * scale * masks[0]["mask"], [None, (x + 1,)]


class WithNested(stacks.Stack):
    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            out = layer(x, scale=0.5, masks=[{"mask": torch.ones_like(x)}])
            x = out[0] + out[1][1][0]
        return self.head(x)


class WrittenResults(stacks.Stack):
    """Writes to what a child returned."""

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            x += 1
        return self.head(x)


class Breaking(stacks.Layer):
    """A graph break of the user."""

    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x * 2


class NoGradients(stacks.Stack):
    def forward(self, x):
        x = self.embed(x)
        with torch.no_grad():
            kept = [layer(x) for layer in self.layers[:2]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x + sum(kept))


class Backbone(stacks.Stack):
    """Calls its layers without gradients only."""

    def forward(self, x):
        with torch.no_grad():
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class Static(stacks.Layer):
    """Its forward takes no self."""

    @staticmethod
    def forward(x):
        return torch.tanh(x) * 2


FAST = ("stores", "nested", "no_grad", "static")
CASES = {
    "stores": lambda: WithLosses(4, Noting),
    "writes to an argument": lambda: stacks.Stack(4, Doubling),
    "returns an argument": lambda: WithState(4, PassingOn),
    "names": lambda: WithNames(4, Named),
    "nested": lambda: WithNested(4, Nested),
    "written results": lambda: WrittenResults(4),
    "graph break": lambda: stacks.Stack(4, Breaking),
    "no_grad": lambda: NoGradients(4),
    "backbone": lambda: Backbone(4),
    "static": lambda: stacks.Stack(4, Static),
}


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=[] if name in FAST and device == "xla" else [pytest.mark.slow])
        for name in CASES
        for device in DEVICES
    ],
)
def test_whatever_children_do(name, device):
    eager = CASES[name]()
    mine = mine_of(eager, device)
    for length in (5, 5, 7):
        assert_equal_steps(eager, mine, torch.randn(2, length, 3), device=device)
    with torch.no_grad():
        x = torch.randn(2, 5, 3)
        torch.testing.assert_close(mine(x.to(device)).cpu(), eager(x), rtol=1e-4, atol=1e-5)


def test_gradients_inside_a_call_without():
    class Enabling(stacks.Stack):
        def forward(self, x):
            with torch.enable_grad():
                x = self.embed(x)
                for layer in self.layers:
                    x = layer(x)
            return x

    eager, x = Enabling(4), torch.randn(2, 5, 3)
    mine = mine_of(eager)
    for model in (mine, eager):
        with torch.no_grad():
            result = model(x)
        result.square().sum().backward()
    torch.testing.assert_close(
        [p.grad for p in mine.layers.parameters()], [p.grad for p in eager.layers.parameters()], rtol=1e-4, atol=1e-5
    )


def test_nested_results_are_those_of_calls():
    clear_cache()
    torch._dynamo.reset()
    with counted() as count:
        mine_of(WithNested(6, Nested))(torch.randn(2, 5, 3))
    assert count["aot_traces"] == 4  # the layer, and what stands before, between and after the calls


def test_hooks_run_in_order():
    def noted(model, x):
        order = []
        for number, layer in enumerate(model.layers):
            layer.register_forward_hook(lambda *_, number=number: order.append(number))
            layer.up.register_forward_hook(lambda m, a, out: out * 2)
        return model(x), order

    eager, x = stacks.Stack(4), torch.randn(2, 5, 3)
    mine, copied = mine_of(eager), copy.deepcopy(eager)
    (result, order), (expected, _) = noted(mine, x), noted(copied, x)
    torch.testing.assert_close(result, expected)
    assert order == [0, 1, 2, 3]


@pytest.mark.parametrize("calls_alone", [False, True])
@pytest.mark.parametrize("hooked", [0, 1])
def test_hooks_inside_one_child_run_for_that_child_only(hooked, calls_alone):
    eager, x = stacks.Stack(4), torch.randn(2, 5, stacks.WIDTH if calls_alone else 3)
    mine = mine_of(eager)
    for model in (eager, mine):
        model.layers[hooked].up.register_forward_hook(lambda m, a, out: out * 2)
    pairs = zip(mine.layers, eager.layers, strict=True) if calls_alone else [(mine, eager)]
    for compiled, expected in pairs:
        torch.testing.assert_close(compiled(x), expected(x), rtol=1e-4, atol=1e-5)


def test_children_that_lead_to_no_result_get_no_gradients():
    class Aside(stacks.Stack):
        def forward(self, x):
            aside = super().forward(x)
            return x @ self.other, aside * 2

    model = Aside(4)
    model.other = nn.Parameter(torch.ones(3, 3))
    compile_blocks(model, options=FLOAT32)
    model(torch.randn(2, 5, 3))[0].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["other"]


@pytest.mark.quick("cpu-0-True", "cpu-1-False", "xla-1-True", "xla-3-False")
@pytest.mark.parametrize("is_aside", [True, False])
@pytest.mark.parametrize("last", [0, 1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_children_without_gradients_in_a_part_of_the_forward(device, last, is_aside):
    class HalfFrozen(stacks.Stack):
        def forward(self, x):
            start = x = self.embed(x)
            for number, layer in enumerate(self.layers):
                with torch.set_grad_enabled(number > last and torch.is_grad_enabled()):
                    x = layer(x)
            return self.head(start if is_aside else x)

    eager = HalfFrozen(4)
    mine = mine_of(eager, device)
    for _ in range(2):
        assert_equal_steps(eager, mine, torch.randn(2, 5, 3), device=device)


def test_a_frozen_child_and_evaluation():
    eager = stacks.Stack(4, lambda: stacks.Layer(0.5)).eval()
    for parameter in eager.layers[2].parameters():
        parameter.requires_grad_(False)
    mine = mine_of(eager)
    assert_equal_steps(eager, mine, torch.randn(2, 5, 3))
    mine.train()
    torch.manual_seed(0)
    first, second = mine(torch.ones(2, 5, 3)), mine(torch.ones(2, 5, 3))
    torch.manual_seed(0)
    assert torch.equal(mine(torch.ones(2, 5, 3)), first)
    assert not torch.equal(first, second)


class Scaled(stacks.Layer):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.slow
def test_more_different_children_than_dynamo_compiles_by_default():
    eager, x = stacks.Stack(12, Scaled), torch.randn(2, 5, 3)
    for number, layer in enumerate(eager.layers):
        layer.scale = 1 / (number + 1)
    mine = mine_of(eager)
    with counted() as count, torch.no_grad():
        torch.testing.assert_close(mine(x), eager(x), rtol=1e-4, atol=1e-5)
    assert count["aot_traces"] == 14  # none runs eagerly


def test_a_child_that_is_another_after_all():
    class Narrowing(stacks.Layer):
        width = stacks.WIDTH

        def forward(self, x):
            return super().forward(x)[..., : self.width]

    model = stacks.Stack(3, Narrowing)
    compile_blocks(model, options=FLOAT32)
    model.layers[1].width = 4
    with pytest.raises(Exception, match=r"layers.0 to layers.2 returned something else"):
        model(torch.randn(2, 5, 3))


def test_other_backends_follow_every_call():
    eager, x = stacks.Stack(4), torch.randn(2, 5, 3)
    mine = mine_of(eager)
    torch.testing.assert_close(torch.compile(mine.forward, backend="aot_eager")(x), eager(x))


def test_explain_shows_the_children():
    explanation = explain(mine_of(stacks.Stack(4)), torch.randn(2, 5, 3), options=FLOAT32)
    (division,) = [d for d in explanation.divisions if d.pieces]
    assert [piece.runs for piece in division.pieces] == [1, 4, 1]


def test_without_repeated_children(caplog):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    expected = model(torch.ones(2, 3))
    with counted() as count:
        torch.testing.assert_close(compile_blocks(model, options=FLOAT32)(torch.ones(2, 3)), expected)
    assert count["aot_traces"] == 1
    assert "no repeated child modules in a Sequential" in caplog.text


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (lambda: mine_of(stacks.Stack(3)), {}, "compiled already: the model itself"),
        (lambda: nn.Sequential(mine_of(stacks.Stack(3))), {}, "compiled already: 0"),
        (lambda: torch.compile(stacks.Stack(3)), {}, "compiled already"),
        (lambda: nn.Sequential, {}, "got type"),
        (lambda: stacks.Stack(3), {"buckets": "pow2"}, "option buckets"),
        (lambda: stacks.Stack(3), {"levels": "x"}, "levels"),
    ],
)
def test_bad_input_changes_nothing(model, options, text):
    model = model()
    before = dict(vars(model)) if isinstance(model, nn.Module) else None
    with pytest.raises(TPUConfigurationError, match=text):
        compile_blocks(model, options=options)
    if before is not None:
        assert vars(model) == before


def test_gradients_are_those_of_one_program():
    torch.manual_seed(0)
    eager, x = stacks.Stack(6), torch.randn(4, 5, 3)
    mine, whole = mine_of(eager), copy.deepcopy(eager)
    run = torch.compile(whole, backend="kp_tpu", options={**FLOAT32, "blocks": "off"})
    for model in (mine, run):
        model(x).square().mean().backward()
    ours, theirs = (flat([p.grad for p in m.parameters()]) for m in (mine, whole))
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-6
