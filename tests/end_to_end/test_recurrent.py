"""`nn.LSTM`, `nn.GRU` and `nn.RNN` in a model: one program, right in inference and training, at every length."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo import clear_cache, explain
from kp_dynamo.telemetry import snapshot
from tests.spine import compiled, on

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
KINDS = ("gru", "lstm", "rnn")


def class_of(kind: str) -> type[nn.RNNBase]:
    """Looked up late: until a test uses kp_dynamo, `nn.GRU` may be the one that torch_xla puts in its place."""
    return getattr(nn, kind.upper())


def largest_of(tensors: list[torch.Tensor]) -> float:
    return max((t.abs().max().item() for t in tensors if t.numel()), default=0.0)


def assert_as_close_as_eager(mine: object, eager32: object, eager64: object) -> None:
    """Four times the rounding of eager float32, whose sums have another order, and 32 of the largest value.

    The largest of all tensors: the gradient of one weight is a sum whose terms are as large as other gradients, and may
    cancel.
    """
    founds, singles, doubles = (pytree.tree_leaves(tree) for tree in (mine, eager32, eager64))
    least = 32 * torch.finfo(torch.float32).eps * largest_of([double.detach() for double in doubles])
    for found, single, double in zip(founds, singles, doubles, strict=True):
        assert found.shape == double.shape
        assert found.dtype == single.dtype
        rounding = (single.double() - double).norm().item()
        assert (found.detach().cpu().double() - double).norm().item() <= 4 * rounding + least


def assert_step_as_close_as_eager(*steps: tuple[object, object]) -> None:
    """Results and gradients, each by their own largest."""
    for part in zip(*steps, strict=True):
        assert_as_close_as_eager(*part)


@st.composite
def layers(draw: st.DrawFn) -> tuple[nn.Module, torch.Tensor, object]:
    """A module in float64, its input and None or its initial states."""
    kind = draw(st.sampled_from(KINDS))
    size, hidden, steps, batch = (draw(st.integers(1, most)) for most in (4, 5, 7, 3))
    how = {
        "num_layers": draw(st.integers(1, 3)),
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
    }
    if kind == "rnn":
        how["nonlinearity"] = draw(st.sampled_from(("tanh", "relu")))
    projected = draw(st.integers(0, hidden - 1)) if kind == "lstm" else 0
    if projected:
        how["proj_size"] = projected
    torch.manual_seed(draw(st.integers(0, 99)))
    module = class_of(kind)(size, hidden, dtype=torch.float64, **how)
    is_batched = draw(st.booleans())
    rows = (batch, steps) if how["batch_first"] else (steps, batch)
    x = torch.randn(*(rows if is_batched else (steps,)), size, dtype=torch.float64)
    states = None
    if draw(st.booleans()):
        count = how["num_layers"] * (1 + how["bidirectional"])
        shape = (count, batch) if is_batched else (count,)
        states = torch.randn(*shape, projected or hidden, dtype=torch.float64)
        if kind == "lstm":
            states = (states, torch.randn(*shape, hidden, dtype=torch.float64))
    return module, x, states


def with_gradients(run: nn.Module, module: nn.Module, x: torch.Tensor, states: object) -> tuple[object, object]:
    """The results, and the gradients of inputs, states and weights of a sum whose terms have different weights."""
    x, states = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(), (x, states))
    results = run(x, states)
    parameters = dict(module.named_parameters())
    leaves = [t for t in pytree.tree_leaves((x, states)) if t is not None]
    total = sum((r * torch.linspace(0.5, 1, r.numel()).to(r).view(r.shape)).sum() for r in pytree.tree_leaves(results))
    return results, torch.autograd.grad(total, [*leaves, *parameters.values()])


def check(module: nn.Module, x: torch.Tensor, states: object, device: str, **options: object) -> None:
    single, given32 = copy.deepcopy(module).float(), pytree.tree_map_only(torch.Tensor, torch.Tensor.float, (x, states))
    mine, given = copy.deepcopy(single).to(device), on(device, given32)
    run = compiled(mine, fullgraph=True, **options)
    # mkldnn's LSTM has no gradient for some of these settings, and no form of its own is compared.
    expected = with_gradients(module, module, x, states)
    step = with_gradients(run, mine, *given)
    assert_step_as_close_as_eager(step, with_gradients(single, single, *given32), expected)
    with torch.no_grad():
        assert_as_close_as_eager(run(*given), single(*given32), module(x, states))


@given(layers())
@examples(max_examples=4)
def test_results_and_gradients_are_eagers(drawn: tuple[nn.Module, torch.Tensor, object]) -> None:
    torch._dynamo.reset()
    check(*drawn, device="cpu")


@pytest.mark.slow
@given(layers(), st.sampled_from(("cpu", "xla")), st.sampled_from(("off", "auto")))
@examples(max_examples=150)
def test_many_settings(drawn: tuple[nn.Module, torch.Tensor, object], device: str, checkpoint: str) -> None:
    torch._dynamo.reset()
    check(*drawn, device=device, checkpoint=checkpoint)


class Tagger(nn.Module):
    """Embedding, a stack, a head: what a language model or a tagger has."""

    def __init__(self, kind: str = "lstm", **how: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.stack = class_of(kind)(6, 8, batch_first=True, **how)
        self.head = nn.Linear(8 * (2 if how.get("bidirectional") else 1), 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.stack(self.embed(tokens))[0])


@pytest.mark.quick("lstm")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_one_graph_and_one_program(kind: str) -> None:
    clear_cache()
    with torch.no_grad():
        found = explain(Tagger(kind, num_layers=2, bidirectional=True), torch.randint(11, (2, 5)))
    assert not found.graph_breaks
    assert (len(found.captures), found.num_programs, len(found.fallbacks)) == (1, 1, 0)


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_another_length_is_right_and_dynamo_captures_lengths_once(device: str) -> None:
    single = Tagger("lstm", num_layers=2)
    mine = copy.deepcopy(single).to(device)
    run = compiled(mine, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for length in (5, 9, 2, 7):
        tokens = torch.randint(11, (2, length))
        torch.testing.assert_close(run(tokens.to(device)).cpu(), single(tokens), rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the second is for every length


@pytest.mark.quick("lstm")
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_loop_learns_what_eager_learns(kind: str) -> None:
    single = Tagger(kind, num_layers=2, bidirectional=True)
    mine = copy.deepcopy(single)
    losses = []
    for model, run in ((single, single), (mine, compiled(mine, fullgraph=True))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        torch.manual_seed(1)
        for _ in range(5):
            tokens = torch.randint(11, (3, 6))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(run(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.testing.assert_close(torch.tensor(losses[5:]), torch.tensor(losses[:5]), rtol=1e-4, atol=1e-5)


def test_dropout_between_layers_drops_and_scales() -> None:
    """torch 2.9's decomposition never applies it."""
    stack = nn.LSTM(4, 64, num_layers=2, dropout=0.4)
    with torch.no_grad():
        for name, weight in stack.named_parameters():
            weight.zero_()
            if name == "weight_ih_l1":
                weight[128:192] = torch.eye(64)  # the cell gate of the second layer reads the first layer
            if name in ("bias_ih_l0", "bias_ih_l1"):
                weight[:] = 3.0 if name == "bias_ih_l0" else 0.0
    x = torch.zeros(1, 32, 4)
    run, first = compiled(stack, fullgraph=True), torch.tensor(3.0)
    h = torch.sigmoid(first) * torch.tanh(torch.sigmoid(first) * torch.tanh(first))
    kept = 0.5 * torch.tanh(0.5 * torch.tanh(h / 0.6))
    found = run(x)[0]
    is_dropped = found.abs() < 1e-6
    # 2048 draws: the share is within five standard deviations of p
    assert abs(is_dropped.float().mean().item() - 0.4) < 5 * (0.24 / 2048) ** 0.5
    torch.testing.assert_close(found[~is_dropped], kept.expand_as(found[~is_dropped]), rtol=1e-5, atol=1e-6)
    assert not torch.equal(run(x)[0], found)
    stack.eval()
    assert (run(x)[0].abs() > 1e-6).all()


def test_states_that_are_carried_from_call_to_call() -> None:
    single = nn.LSTM(3, 4, num_layers=2)
    run, mine, eager = compiled(copy.deepcopy(single), fullgraph=True, donate="mutated"), None, None
    for _ in range(4):
        x = torch.randn(5, 2, 3)
        found, mine = run(x, mine)
        expected, eager = single(x, eager)
        torch.testing.assert_close((found, mine), (expected, eager), rtol=1e-5, atol=1e-6)
        mine, eager = (tuple(s.detach() for s in states) for states in (mine, eager))


class Streaming(nn.Module):
    """Keeps its state in a buffer, which it overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(3, 4)
        self.register_buffer("h", torch.zeros(1, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, h = self.cell(x, self.h)
        self.h.copy_(h)
        return y


@pytest.mark.parametrize("donate", ["off", "mutated"])
def test_a_state_in_a_buffer(donate: str) -> None:
    single = Streaming()
    mine = copy.deepcopy(single).to("xla")
    run = compiled(mine, donate=donate)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 2, 3)
            torch.testing.assert_close(run(x.to("xla")).cpu(), single(x), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(mine.h.cpu(), single.h, rtol=1e-5, atol=1e-6)


@pytest.mark.quick("gru-aggressive", "lstm-balanced", "rnn-conservative")
@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
@pytest.mark.parametrize("kind", KINDS)
def test_levels_are_as_close_as_autocast(kind: str, level: str) -> None:
    double = Tagger(kind, num_layers=2).double().eval()
    single, tokens = copy.deepcopy(double).float(), torch.randint(11, (4, 12))
    with torch.no_grad():
        expected = double(tokens)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = single(tokens)
        found = torch.compile(single, backend="kp_tpu", fullgraph=True, options={"level": level})(tokens)
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= 1.1 * (narrow - expected).norm()


@pytest.mark.quick("lstm")
@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_model_and_autocast_have_eagers_dtypes(kind: str) -> None:
    stack, x = class_of(kind)(4, 8, num_layers=2), torch.randn(6, 3, 4)
    narrow, double = copy.deepcopy(stack).bfloat16(), copy.deepcopy(stack).double()
    with torch.no_grad():
        expected = double(x.double())[0]
        eager, found = narrow(x.bfloat16())[0], compiled(narrow, fullgraph=True)(x.bfloat16())[0]
        assert found.dtype == eager.dtype == torch.bfloat16
        assert (found - expected).norm() <= 1.1 * (eager - expected).norm()
    with torch.autocast("cpu", torch.bfloat16):
        eager, found = stack(x), compiled(stack, fullgraph=True)(x)
    dtypes = [t.dtype for t in pytree.tree_leaves(eager)]
    assert [t.dtype for t in pytree.tree_leaves(found)] == dtypes
    eager, found = eager[0], found[0]
    assert (found - expected).norm() <= 1.1 * (eager - expected).norm()


def test_the_steps_are_compiled_once() -> None:
    """The body of the While has no length. In CPU-seconds, which other processes do not change."""
    seconds: dict[int, list[float]] = {4: [], 32: [], 512: []}
    for steps in (4, 32, 512, 32, 512):  # the first warms up
        clear_cache()
        torch._dynamo.reset()
        stack, x = nn.LSTM(8, 8, num_layers=2), torch.randn(steps, 2, 8, requires_grad=True)
        start = time.process_time()
        compiled(stack, fullgraph=True)(x)[0].sum().backward()
        seconds[steps].append(time.process_time() - start)
    assert min(seconds[512]) <= 2 * min(seconds[32])


def test_checkpoint_and_repeated_layers() -> None:
    single = Tagger("lstm", num_layers=2)
    tokens = torch.randint(11, (2, 6))

    def recomputed(tokens: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(single, tokens, use_reentrant=False)

    wanted = torch.autograd.grad(single(tokens).square().sum(), list(single.parameters()))
    for options in ({}, {"checkpoint": "auto"}, {"blocks": "on"}):
        run = compiled(recomputed, fullgraph=True, **options)
        found = torch.autograd.grad(run(tokens).square().sum(), list(single.parameters()))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_other_backends_still_give_such_models_up() -> None:
    assert not torch._dynamo.config.allow_rnn
    compiled(nn.LSTM(3, 4))(torch.randn(5, 2, 3))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(nn.LSTM(3, 4), backend="eager")(torch.randn(5, 2, 3))
    assert not torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch._dynamo.config.allow_rnn


def test_what_eager_refuses_is_refused() -> None:
    stack = nn.GRU(3, 4)
    with pytest.raises(Exception, match="sequence length"):
        compiled(stack)(torch.randn(0, 2, 3))
    with pytest.raises(Exception, match=r"input\.size"):
        compiled(stack)(torch.randn(5, 2, 4))


def test_nothing_runs_on_the_cpu() -> None:
    before = snapshot()["fallbacks"]
    stack = nn.LSTM(3, 4, proj_size=2, bidirectional=True)
    compiled(stack, strict=True)(torch.randn(5, 2, 3))[0].sum().backward()
    assert snapshot()["fallbacks"] == before
