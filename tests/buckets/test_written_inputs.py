"""Inputs of a padded size that are written in place, or returned: the caller's tensors, not the padded copies."""

from __future__ import annotations

import pytest
import torch

from kp_dynamo import mark_sequence
from kp_dynamo.exceptions import TPUValidationError
from kp_dynamo.telemetry import snapshot
from tests.spine import assert_same, compiled, on

LENGTHS = (5, 7, 11, 8, 5)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")
    torch._dynamo.reset()


def scaled(x, state):
    state.mul_(2)
    return (x * state).sum(1)


def kept(x, state):
    state.copy_(x.detach())
    return x * 2


def returned(x, state):
    state.add_(x)
    return state


def written_in_parts(x, state):
    state.add_(x.flip(1))
    state[:, 1:] = 0
    return state.sum(1), x


def without_grad(x, state):
    with torch.no_grad():
        state.mul_(2)
    return x * state


def through_a_view(x, state):
    state.view(3, -1)[:, :4] = x[:, 0]
    return state.sum()


def rolled(x, state):
    state[:] = x.roll(1, 1)
    return x.mean(1)


def of_the_gradient_too(x, state):
    x.mul_(state)
    return x.cumsum(1)


def exchanged(x, state):
    before = x.clone()
    x.copy_(state)
    state.copy_(before)
    return (x - state).softmax(1)


def views(x, state):
    return x[:, 1:], x.sum(1), x.detach(), state[:, -1]


def views_of_the_written(x, state):
    state.mul_(2)
    return state[:, 1:], state.flatten(0, 1), x * state


def flat_both_ways(x, state):
    """The first result is a view of `x`, the second a copy."""
    return x.reshape(-1, 4), x.transpose(0, 1).reshape(-1, 4), (x * state).sum()


def under_another_form(x, state):
    return x.view_as(x), state, x[..., :2], x.unsqueeze(0)


def given(length, device, requires_grad, *, are_leaves):
    """Leaves, and `x` and `state` of shape [3, length, 4]."""
    random = torch.Generator().manual_seed(length)
    leaves = [torch.randn(3, length, 4, generator=random) for _ in range(2)]
    leaves = [on(device, leaf).requires_grad_(needs) for leaf, needs in zip(leaves, requires_grad, strict=True)]
    arguments = leaves if are_leaves else [leaf * 2 for leaf in leaves]
    return leaves, [mark_sequence(argument, 1) for argument in arguments]


def everything(fn, leaves, arguments):
    """Results, arguments behind the call, which of them are results, whether they need gradients, and gradients."""
    needing = [leaf for leaf in leaves if leaf.requires_grad]
    results = fn(*arguments)
    results = list(results) if isinstance(results, tuple) else [results]
    same = [[result is argument for argument in arguments] for result in results]
    tensors = [*results, *arguments]
    wanted = [t for t in tensors if t.requires_grad and t.grad_fn is not None]
    ramps = [torch.arange(t.numel(), dtype=t.dtype).reshape(t.shape).to(t.device) for t in wanted]
    total = sum((t * ramp).sum() for t, ramp in zip(wanted, ramps, strict=True))
    gradients = torch.autograd.grad(total, needing, allow_unused=True) if wanted else ()
    # XLA tensors have no strides of their own.
    return same, [t.requires_grad for t in tensors], [t.detach().contiguous().cpu() for t in tensors], list(gradients)


def require_eager(fn, device, requires_grad, *, are_leaves=True):
    run, before = compiled(fn, buckets=[8, 16]), snapshot()["bucket_refusals"]
    for length in LENGTHS:
        found = everything(run, *given(length, device, requires_grad, are_leaves=are_leaves))
        expected = everything(fn, *given(length, "cpu", requires_grad, are_leaves=are_leaves))
        assert found[:2] == expected[:2]
        assert_same(found[2:], expected[2:])
    assert snapshot()["bucket_refusals"] == before


@pytest.mark.quick("kept-xla", "written_in_parts-xla", "without_grad-xla", "rolled-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(
    "fn", [scaled, kept, returned, written_in_parts, without_grad, through_a_view, rolled], ids=lambda fn: fn.__name__
)
def test_an_input_that_is_written(fn, device):
    require_eager(fn, device, (True, False))


@pytest.mark.quick("returned", "of_the_gradient_too", "exchanged")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
@pytest.mark.parametrize("fn", [scaled, returned, without_grad, of_the_gradient_too, exchanged])
def test_a_written_input_that_has_a_history(fn):
    require_eager(fn, "cpu", (True, True), are_leaves=False)


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_written_leaf(device):
    require_eager(without_grad, device, (True, True))


@pytest.mark.quick("views-cpu", "views_of_the_written-cpu", "flat_both_ways-xla", "under_another_form-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("fn", [views, views_of_the_written, flat_both_ways, under_another_form])
def test_views_of_inputs(fn, device):
    require_eager(fn, device, (True, False))


@pytest.mark.quick("views-xla", "views_of_the_written-cpu", "under_another_form-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("fn", [views, views_of_the_written, under_another_form])
def test_views_of_inputs_are_written_through(fn, device):
    run = compiled(fn, buckets=[8, 16])
    for length in LENGTHS:
        _, mine = given(length, device, (False, False), are_leaves=True)
        _, eager = given(length, "cpu", (False, False), are_leaves=True)
        for arguments, function in ((mine, run), (eager, fn)):
            results = function(*arguments)
            for number, result in enumerate(results):
                result.add_(number + 1)
            arguments.extend(results if device == "cpu" else [result.contiguous() for result in results])
        assert_same(mine, eager if device == "cpu" else [tensor.contiguous() for tensor in eager])


@pytest.mark.quick("mutated")
@pytest.mark.parametrize("donate", ["off", "mutated"])
def test_no_gradients(donate):
    run = compiled(exchanged, buckets=[8, 16], donate=donate)
    for device in ("cpu", "xla"):
        for length in LENGTHS:
            _, mine = given(length, device, (False, False), are_leaves=True)
            _, eager = given(length, "cpu", (False, False), are_leaves=True)
            assert_same((run(*mine), *mine), (exchanged(*eager), *eager))


def test_inputs_that_come_to_overlap_are_refused():
    """Their padded copies do not."""

    def scaled_rows(x, state):
        state.mul_(2)
        return (x * state).sum(0)

    run, base = compiled(scaled_rows, buckets=[8, 16]), on("xla", torch.randn(40, 4))

    def called(first, second):
        return run(*(mark_sequence(base[start : start + 6], 0) for start in (first, second)))

    called(0, 10)
    with pytest.raises(TPUValidationError, match="overlap in memory"):
        called(0, 3)


def test_an_input_with_an_offset_is_padded():
    """Dynamo hands its offset on as a number that varies."""
    run, before = compiled(lambda x: x.softmax(0), buckets=[8, 16]), snapshot()["bucket_refusals"]
    for length in LENGTHS:
        x = torch.randn(length + 2, 4)[1 : 1 + length]
        assert_same(run(mark_sequence(x, 0)), x.softmax(0))
    assert snapshot()["bucket_refusals"] == before


def test_an_input_that_is_cut_from_a_wider_one_is_padded():
    """Dynamo hands its strides on."""
    run, before = compiled(lambda x: x.softmax(1) @ x.mT, buckets=[8, 16]), snapshot()["bucket_refusals"]
    for length in LENGTHS:
        x = torch.randn(3, length, length + 3)[:, :, :length]
        assert_same(run(mark_sequence(mark_sequence(x, 1), 2)), x.softmax(1) @ x.mT)
    assert snapshot()["bucket_refusals"] == before


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_writing_beside_a_view_in_inference_mode(device):
    """torch_xla takes no view of an ordinary tensor there: what is padded must not be bound to that mode either."""

    def fn(state, rows):
        state.mul_(2)
        return (rows.view(-1),)

    run = compiled(fn, buckets=[8, 16])
    for length in LENGTHS:
        value, rows = torch.randn(3, length), torch.ones(2, 3)
        states, my_rows = [on(device, value), value.clone()], on(device, rows)
        mark_sequence(states[0], 1)
        with torch.inference_mode():
            found = [*run(states[0], my_rows), states[0]]
            expected = [*fn(states[1], rows), states[1]]
            assert_same([t.contiguous().cpu() for t in found], [t.contiguous() for t in expected])
