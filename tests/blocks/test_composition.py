"""Divided graphs with the other options, and with what callers do to a compiled function."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from kp_dynamo import FlashAttention, PassReport, clear_cache, explain
from tests.blocks import stacks
from tests.blocks.test_divided_models import distances, divided, flat, named, step
from tests.spine import DEVICES, compiled, counted, on, run_script


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return flat([p.grad for p in model.parameters()])


def close(got, wanted, bound=1e-5):
    return float((got - wanted).norm()) <= bound * float(wanted.norm())


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_draws_other_masks_in_each_layer_and_repeats_them_with_the_seed(device):
    model = stacks.Stack(4, lambda: stacks.Layer(0.5)).to(device)
    seen = []
    for layer in model.layers:
        layer.load_state_dict(model.layers[0].state_dict())
    mine, events = divided(lambda x: [x := layer(x) - x for layer in model.layers])
    x = torch.ones(1, 400, 8, device=device)
    torch.manual_seed(1)
    seen = [y.detach().cpu() for y in mine(x)]
    masks = [y == 0 for y in seen]
    torch.manual_seed(1)
    again = [y.detach().cpu() for y in mine(x)]
    assert events[0].pieces, events[0].reason
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))
    assert len({mask.numpy().tobytes() for mask in masks}) == len(masks)


@pytest.mark.parametrize("device", DEVICES)
def test_backward_uses_the_masks_of_the_forward(device):
    """y = x * mask * 2 in the last operator of each layer, so the gradient of x is the product of the masks."""

    def drop(x):
        for _ in range(4):
            x = torch.nn.functional.dropout((x @ eye).reshape(-1, 8), 0.5, True).abs()
        return x

    eye = torch.eye(8, device=device)
    x = torch.ones(50, 8, device=device, requires_grad=True)
    mine, events = divided(drop)
    y = mine(x)
    y.sum().backward()
    assert events[0].pieces, events[0].reason
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_retained_graph_and_gradients_by_grad(device):
    eager = stacks.Stack()
    mine, _ = divided(copy.deepcopy(eager).to(device))
    x = on(device, torch.randn(2, 5, 3).requires_grad_())
    y = mine(x)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(y.sum(), x)[0]
    wanted = torch.autograd.grad(eager(e := on("cpu", x)).sum(), e)[0]
    assert torch.equal(first.cpu(), second.cpu())
    assert close(flat(first), flat(wanted))


def test_second_derivatives_are_refused_by_name():
    mine, _ = divided(stacks.Stack())
    x = torch.randn(2, 5, 3, requires_grad=True)
    (g,) = torch.autograd.grad(mine(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        g.sum().backward()


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", DEVICES)
def test_training_then_no_grad_then_inference_mode(device):
    eager = stacks.Stack()
    mine, _ = divided(copy.deepcopy(eager).to(device))
    x = torch.randn(2, 5, 3)
    assert close(gradients(mine, x.to(device)), gradients(eager, x))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert close(flat(mine(x.to(device))), flat(eager(x)))
    assert close(gradients(mine, x.to(device)), gradients(eager, x))


def test_an_equal_model_compiles_nothing_and_another_depth_only_what_differs():
    x = torch.randn(2, 5, 3)
    compiled(stacks.Stack(4), blocks="on")(x)
    with counted() as second:
        compiled(stacks.Stack(4), blocks="on")(x)
    with counted() as deeper:
        compiled(stacks.Stack(7), blocks="on")(x)
    assert second.programs == deeper.programs == 0
    assert second.aot_traces == deeper.aot_traces == 0


def test_programs_do_not_grow_with_depth():
    found = []
    for depth in (3, 12):
        clear_cache()
        torch._dynamo.reset()
        with counted() as counts:
            gradients(compiled(stacks.Stack(depth), blocks="on"), torch.randn(2, 5, 3))
        found.append(counts.programs)
    assert found == [6, 6]


def test_evicted_programs_are_compiled_again():
    eager = stacks.Stack()
    mine, x = compiled(copy.deepcopy(eager), blocks="on"), torch.randn(2, 5, 3)
    wanted = gradients(eager, x)
    assert close(gradients(mine, x), wanted)
    clear_cache()
    assert close(gradients(mine, x), wanted)


@pytest.mark.quick("balanced")
@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
def test_levels_round_as_in_the_whole_graph(level):
    eager = stacks.Stack()
    exact, x = copy.deepcopy(eager).double(), torch.randn(2, 5, 3)
    reference = gradients(exact, x.double())
    distance = {}
    for blocks in ("on", "off"):
        mine = compiled(copy.deepcopy(eager), blocks=blocks, level=level, precision="bfloat16")
        distance[blocks] = float((gradients(mine, x) - reference).norm() / reference.norm())
    assert distance["on"] <= 1.1 * distance["off"]


@pytest.mark.quick("auto", "0.3")
@pytest.mark.parametrize("checkpoint", ["attention", "blocks", "auto", 0.3])
def test_checkpoint_options(checkpoint):
    eager = stacks.Masked()
    x, keep = torch.randn(2, 5, 8), torch.ones(5, 5, dtype=torch.bool)
    mine, _ = divided(copy.deepcopy(eager), checkpoint=checkpoint)
    for model in (mine, eager):
        model(x, keep).square().sum().backward()
    got, wanted = (flat([p.grad for p in model.parameters()]) for model in (mine, eager))
    assert close(got, wanted)


def test_checkpointed_blocks_save_what_enters_a_layer():
    options = {"blocks": "on", "checkpoint": "blocks", "precision": "float32", "strict": True}
    explanation = explain(stacks.Stack(4), torch.randn(2, 5, 3), options=options)
    ran = {p.graph: p.notes for p in explanation.passes if p.name == "checkpoint_blocks"}
    assert list(ran.values()) == [(), ("saves the inputs of each layer",), ()]


@pytest.mark.parametrize("device", DEVICES)
def test_donated_caches(device):
    eager = stacks.Cached()
    mine, events = divided(copy.deepcopy(eager).to(device), donate="mutated")
    args = torch.randn(2, 1, 8), torch.tensor([3]), [torch.randn(2, 6, 8) for _ in range(4)]
    given, expected = on(device, args), on("cpu", args)
    with torch.no_grad():
        for _ in range(3):
            assert close(flat(mine(*given)), flat(eager(*expected)))
            assert close(flat(given[2]), flat(expected[2]))
    assert events[0].pieces, events[0].reason


@pytest.mark.quick("Autocast-True", "AutocastLayers-False")
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("kind", [stacks.Autocast, stacks.AutocastLayers])
def test_autocast_regions_of_cpu_tensors(kind, trains):
    eager = kind()
    exact, x = copy.deepcopy(eager).double(), torch.randn(2, 5, 3)
    mine, events = divided(copy.deepcopy(eager))
    got, wanted, reference = (step(m, (v,), trains=trains) for m, v in ((mine, x), (eager, x), (exact, x.double())))
    of_mine, of_eager = distances((got[0], named(got[1])), wanted[:2]), distances(wanted[:2], reference[:2])
    assert all(b > 1e-4 and a < 2 * b for a, b in zip(of_mine[: 1 + trains], of_eager, strict=False))
    assert [piece.runs for piece in events[0].pieces] == [1, 4, 1], events[0].reason


def test_layers_with_different_casts_are_different_blocks():
    """`keep_float32` reads module paths, so that no two layers are equal."""
    _, events = run_on(stacks.Stack(4), keep_float32=["layers.1.*"])
    assert events[0].pieces == ()


@dataclass(frozen=True)
class Counting:
    name: ClassVar[str] = "counting"

    def __call__(self, gm):
        return PassReport(self.name, len(gm.graph.nodes))


class CountingEverywhere(Counting):
    reads_modules = False


@pytest.mark.parametrize(
    ("own", "runs"), [(Counting(), []), (CountingEverywhere(), [1, 4, 1]), (FlashAttention(), [1, 4, 1])]
)
def test_a_pass_may_say_that_it_reads_no_module(own, runs):
    _, events = run_on(stacks.Stack(4), extra_passes=[own])
    assert [piece.runs for piece in events[0].pieces] == runs


def run_on(model, **options):
    mine, events = divided(model, **options)
    return mine(torch.randn(2, 5, 3)), events


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it where the graph breaks
def test_a_graph_break_between_layers():
    class Broken(stacks.Stack):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers[:3]:
                x = layer(x)
            torch._dynamo.graph_break()
            for layer in self.layers[3:]:
                x = layer(x)
            return self.head(x)

    eager = Broken(6)
    mine, events = divided(copy.deepcopy(eager))
    x = torch.randn(2, 5, 3)
    assert close(gradients(mine, x), gradients(eager, x))
    assert [tuple(piece.runs for piece in event.pieces) for event in events] == [(1, 3), (3, 1)]


@pytest.mark.filterwarnings("ignore:blocks='on'")
def test_other_shapes_at_later_calls():
    eager = stacks.Stack()
    mine, _ = divided(copy.deepcopy(eager))
    for length in (5, 3, 7, 3):
        x = torch.randn(2, length, 3)
        assert close(gradients(mine, x), gradients(eager, x))


def test_a_gradient_that_is_none_stays_none():
    model = stacks.WithHiddenStates()
    mine, _ = divided(model)
    mine(torch.randn(2, 5, 3))[1][1].sum().backward()
    assert [p.grad is None for p in model.layers[1].parameters()] == [False] * 6
    assert all(p.grad is None for layer in model.layers[2:] for p in layer.parameters())
    assert model.head.weight.grad is None


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", DEVICES)
def test_layers_behind_a_result_without_a_gradient_get_none(device):
    def two_towers(x, first, second):
        for _ in range(3):
            x = torch.tanh(x @ first) * 1.5 + x
        y = x.detach()
        for _ in range(3):
            y = torch.tanh(y @ second) * 1.5 + y
        return x.sum(), y.sum()

    args = [torch.randn(8, 8, device=device, requires_grad=True) for _ in range(3)]
    mine, events = divided(two_towers)
    mine(*args)[1].backward()
    assert [piece.runs for piece in events[0].pieces].count(3) >= 1, events[0].reason
    assert [a.grad is None for a in args] == [True, True, False]


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_results_may_be_written_to(device):
    eager = stacks.WithHiddenStates()
    mine, _ = divided(copy.deepcopy(eager).to(device))
    x = torch.randn(2, 5, 3)
    for model, given in ((mine, x.to(device)), (eager, x)):
        y, states, _ = model(given)
        y.mul_(2)
        (y.sum() + states[0].sum()).backward()
    assert close(flat([p.grad for p in mine.parameters()]), flat([p.grad for p in eager.parameters()]))


def test_training_on_the_cpu_before_the_device_is_used():
    """torch then has no thread for the backward of XLA tensors, and CPU tensors need none."""
    run_script("""
import torch
from tests.blocks import stacks
torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
model = torch.compile(stacks.Stack(4), backend="kp_tpu", options={"blocks": "on", "precision": "float32"})
model(torch.randn(2, 5, 3)).sum().backward()
""")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_many_backwards_of_states_and_views(device):
    """Autograd ran the pieces in one thread and moved gradients in another: one backward of twenty to 150 failed."""

    class States(stacks.Stack):
        def forward(self, x):
            x, states = self.embed(x), []
            for layer in self.layers:
                x = layer(x)
                states.append(x)
            return [*states, states[1].mT, states[2].mT]

    eager = States(8)
    mine, _ = divided(copy.deepcopy(eager).to(device))
    for _ in range(200):
        x = torch.randn(16, 5, 3)
        for model, given in ((mine, x.to(device)), (eager, x)):
            model.zero_grad()
            states = [t.cpu() for t in model(given)]
            sum(t.sin().square().mean() for t in states).backward()
        assert close(flat([p.grad for p in mine.parameters()]), flat([p.grad for p in eager.parameters()]))


def test_threads_share_the_pieces():
    from concurrent.futures import ThreadPoolExecutor

    eager = stacks.Stack()
    mine, _ = divided(copy.deepcopy(eager))
    xs = [torch.randn(2, 5, 3) for _ in range(8)]
    with torch.no_grad():
        mine(xs[0])
    with ThreadPoolExecutor(4) as pool:

        def call(x):
            with torch.no_grad():
                return mine(x)

        got = list(pool.map(call, xs))
    assert all(close(flat(a), flat(eager(x))) for a, x in zip(got, xs, strict=True))


class FirstOnly(torch.autograd.Function):
    """Adds, and has no gradient for the second operand."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.quick("xla")
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # Dynamo instantiates it
@pytest.mark.parametrize("device", DEVICES)
def test_a_function_without_a_gradient_for_the_layers(device):
    """Its result requires a gradient, though none reaches the layers."""

    class Cut(stacks.Stack):
        def forward(self, x):
            h = skip = self.embed(x).detach()
            for layer in self.layers:
                h = layer(h)
            return FirstOnly.apply(skip, h)

    eager = Cut(4)
    mine, events = divided(copy.deepcopy(eager).to(device))
    x = torch.randn(2, 5, 3)
    result = mine(x.to(device))
    assert events[0].pieces
    assert (result.requires_grad, eager(x).requires_grad) == (True, True)
    result.sum().backward()
    assert [p.grad for p in mine.parameters()] == [None] * len(list(eager.parameters()))


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # Dynamo instantiates it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch hides
def test_a_function_without_a_gradient_for_an_operand():
    for operand in (torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True) * 2):
        torch._dynamo.reset()
        assert compiled(FirstOnly.apply)(torch.randn(3), operand).requires_grad


def test_an_input_in_another_layout_keeps_eagers_strides():
    """On the device, where nothing has strides, it is the input; and a view of the input stays one."""

    class Copied(stacks.Stack):
        def forward(self, x):
            copied, transposed = x.contiguous(), x.transpose(0, 1)
            for layer in self.layers:
                x = layer(x)
            return copied, transposed, x

    model = Copied(4)
    mine, events = divided(model)
    x = torch.randn(8, 5, 3).permute(2, 1, 0)
    with torch.no_grad():
        results, expected = mine(x), model(x)
    assert events[0].pieces, events[0].reason
    assert [r.stride() for r in results] == [r.stride() for r in expected]
    assert results[1].data_ptr() == x.data_ptr()
    assert results[0].data_ptr() != x.data_ptr()
    torch.testing.assert_close(results, expected)
