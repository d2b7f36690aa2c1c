"""Graphs that stay whole, each with its reason, and layers that are left out of a block."""

import copy
import re

import pytest
import torch
from torch import nn

from kp_dynamo.exceptions import TPUOptimizationError
from kp_dynamo.telemetry import warn_once
from tests.blocks import stacks
from tests.blocks.test_composition import close
from tests.blocks.test_divided_models import divided, flat
from tests.spine import on


def what_became_of(fn, *args, dynamic=None, **options):
    """What became of the only graph of `fn`, whose results are eager's."""
    mine, events = divided(fn, **options)
    mine = mine if dynamic is None else torch.compile(mine._torchdynamo_orig_callable, backend="eager")
    given, expected = on("cpu", args), on("cpu", args)
    own = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
    assert close(flat(mine(*given)), flat(own(*expected)))
    (event,) = events
    return event


def repeated(x, weights, body):
    for weight in weights:
        x = body(x, weight)
    return x


# Drawn at import, before a test sets a seed.
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 8, generator=GENERATOR)
WEIGHTS = [torch.randn(8, 8, generator=GENERATOR) / 3 for _ in range(4)]


def test_nothing_repeats():
    event = what_became_of(nn.Linear(8, 8), X)
    assert event.reason == "no stretch of its 1 operators repeats 2 times and can be compiled by itself"


def test_repeats_without_a_matmul():
    event = what_became_of(lambda x: x.sin().cos().exp().neg().sin().cos().exp().neg(), X)
    assert event.reason.startswith("no stretch")


def difference(event):
    """What the reason says after the general sentence."""
    general, _, what = event.reason.partition("; ")
    assert re.fullmatch(r"no stretch of its \d+ operators repeats 2 times and can be compiled by itself", general)
    return what


def test_a_constant_differs():
    event = what_became_of(stacks.Numbered(), torch.randn(2, 5, 3))
    assert difference(event) == "layers.1 differs from layers.0: mul has the constant 1.1 instead of 1.0"


def test_a_constant_differs_in_layers_that_are_no_modules():
    def scaled(x, weights):
        for number, weight in enumerate(weights):
            x = torch.tanh(x @ weight) * (1.5 + number) + x
        return x

    assert difference(what_became_of(scaled, X, WEIGHTS)) == (
        "the stretch of operators 4 to 7 differs from the stretch of operators 0 to 3: "
        "mul has the constant 2.5 instead of 1.5"
    )


class Activated(nn.Module):
    def __init__(self, activation, width=8):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(8, width), nn.Linear(width, 8), activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


def test_an_operator_differs():
    model = stacks.Stack(2, iter([Activated(torch.tanh), Activated(torch.relu)]).__next__)
    assert difference(what_became_of(model, torch.randn(2, 5, 3))) == (
        "layers.1 differs from layers.0: operator relu instead of tanh in layers.1 (Activated)"
    )


def test_a_width_differs():
    model = nn.Sequential(Activated(torch.tanh), Activated(torch.tanh, 6))
    assert difference(what_became_of(model, X)) == (
        "module 1 differs from module 0: linear in 1.up (Linear) returns float32[4, 6] instead of float32[4, 8]"
    )


def test_a_frozen_parameter():
    model = stacks.Stack(2)
    model.layers[1].up.weight.requires_grad_(False)
    assert difference(what_became_of(model, torch.randn(2, 5, 3))) == (
        "layers.1 differs from layers.0: linear in layers.1.up (Linear) reads float32[16, 8] with requires_grad=False "
        "instead of True"
    )


def test_other_edges_between_equal_operators():
    def crossed(x, weights):
        for number, (one, other) in enumerate(zip(weights[::2], weights[1::2], strict=True)):
            a, b = torch.tanh(x @ one), torch.tanh(x @ other)
            x = (a - b if number else b - a) + x
        return x

    assert difference(what_became_of(crossed, X, WEIGHTS)).endswith(": sub reads another value")


def test_an_edge_differs():
    """Equal operators, but every layer reads another value of the one before."""

    def zigzag(x, weights):
        y = x
        for number, weight in enumerate(weights):
            h = torch.tanh((x if number % 2 else y) @ weight)
            x, y = h + y, h * x
        return x, y

    event = what_became_of(zigzag, X, WEIGHTS)
    assert [piece.runs for piece in event.pieces] == [2]


def test_a_value_is_written_to_in_a_later_layer():
    def residual(x, weights):
        x = x * 1.0
        return repeated(x, weights, lambda x, weight: x.add_(torch.tanh(x @ weight).clone()))

    assert difference(what_became_of(residual, X, WEIGHTS)).endswith(
        "but between them x passes, which is written to in place later"
    )


def test_a_residual_stream_that_layers_write_to():
    assert difference(what_became_of(stacks.InPlace(), torch.randn(2, 5, 3))) == (
        "layers.1 repeats layers.0, but between them x passes, which is written to in place later"
    )


def shared_memory(x, weights, memory):
    """A scratch tensor of the caller, without a gradient until the first layer writes to it."""
    for weight in weights:
        memory.add_(torch.tanh(x @ weight))
        x = x + memory.clone().tanh()
    return x


def stream_of_the_caller(x, weights, stream):
    for weight in weights:
        stream.add_(torch.tanh(stream.clone() @ weight))
    return stream.sin() + x


def through_a_view(x, weights, memory):
    for weight in weights:
        memory[:2].mul_(0.5).add_(torch.tanh(x @ weight)[:2])
        x = x + memory
    return x


@pytest.mark.quick("cpu-shared_memory", "xla-stream_of_the_caller", "xla-through_a_view")
@pytest.mark.parametrize("fn", [shared_memory, stream_of_the_caller, through_a_view])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_an_input_that_requires_a_gradient_only_after_a_write(fn, device):
    def gradients(run, device):
        x, *weights = (t.clone().to(device).requires_grad_() for t in (X, *WEIGHTS))
        memory = torch.linspace(-1, 1, 32).view(4, 8).to(device)
        run(x, weights, memory).square().sum().backward()
        return [t.grad.cpu() for t in (x, *weights)] + [memory.detach().cpu()]

    mine, events = divided(fn)
    found = gradients(mine, device)
    torch.testing.assert_close(found, gradients(fn, "cpu"))
    assert "which requires a gradient only after a write" in events[0].reason


def test_a_view_of_a_written_input_crosses():
    def views(state, weights):
        row = older = state[0]
        for weight in weights:
            state[1:].mul_(0.5).add_(torch.tanh(row @ weight) + older)
            row, older = state[1], row
        return row

    event = what_became_of(views, X, WEIGHTS)
    assert difference(event).endswith("passes, a view of an input that the graph writes to")


def test_a_block_that_writes_gets_one_tensor_twice():
    def twice(x, weights, states):
        for weight, (one, other) in zip(weights, states, strict=True):
            x = torch.tanh(x @ weight) + other.sum()
            one.copy_(x)
        return x

    states = [(torch.zeros(4, 8), torch.ones(4, 8)) for _ in range(3)]
    shared = torch.zeros(4, 8)
    event = what_became_of(twice, X, WEIGHTS, [*states, (shared, shared)])
    assert event.reason == "a block writes to one of its inputs, and gets one tensor as two of them"


def test_inputs_overlap_and_one_is_written_to():
    def overlapping(x, weights, states):
        for weight, state in zip(weights, states, strict=True):
            x = torch.tanh(x @ weight) + state
            state.copy_(x)
        return x

    base = torch.zeros(16, 8)
    mine, events = divided(overlapping)
    expected, own = base.clone(), base.clone()
    parts = [own[2 * i : 2 * i + 4] for i in range(4)]
    wanted = overlapping(X, WEIGHTS, [expected[2 * i : 2 * i + 4] for i in range(4)])
    assert close(flat(mine(X, WEIGHTS, parts)), flat(wanted))
    assert close(flat(own), flat(expected))
    assert events[0].reason == "it writes to an input that overlaps another in memory"


def test_a_compiled_optimizer():
    model = stacks.Stack()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(2, 5, 3)).sum().backward()
    mine, events = divided(optimizer.step)
    mine()
    assert all(not event.pieces for event in events)


def test_elements_of_a_storage():
    def strided(x, weights):
        x = x.view(2, 2, 8)[:, 0]
        return repeated(x, weights, lambda x, w: torch.tanh(x @ w) + x.as_strided((2, 8), (8, 1)))

    event = what_became_of(strided, X, WEIGHTS)
    assert event.reason == "as_strided reads elements of its operand's storage, which another piece may not have"


def test_strict_refuses():
    mine, _ = divided(nn.Linear(8, 8), strict=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        mine(X)
    assert isinstance(caught.value.inner_exception, TPUOptimizationError)
    assert "strict=True and blocks='on' has no effect on a graph: no stretch" in str(caught.value.inner_exception)


def test_on_warns_once(caplog, monkeypatch):
    monkeypatch.setattr(warn_once, "_logged", set())
    for _ in range(2):
        torch._dynamo.reset()
        divided(nn.Linear(7, 7))[0](torch.randn(3, 7))
    text = "blocks='on' has no effect on a graph: no stretch of its 1 operators"
    assert sum(text in record.getMessage() for record in caplog.records) == 1
