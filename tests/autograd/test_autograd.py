"""Gradients through compiled graphs, and torch's own ways around a backward."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from kp_dynamo import XLACompilationError
from tests.spine import DEVICES, check_gradients_like_eager, compiled, counted

RAMP = torch.linspace(-1, 1, 12).reshape(3, 4)


def model_and_gradient(device, scale=1.0):
    """A Linear and the gradient of the sum of squares by its weight, times `scale`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    (gradient,) = torch.autograd.grad(model(RAMP.to(device)).square().sum(), model.weight)
    return model, gradient.cpu() * scale


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_accumulate(device):
    model, expected = model_and_gradient(device, scale=3)
    run = compiled(model, fullgraph=True)
    for _ in range(3):
        run(RAMP.to(device)).square().sum().backward()
    torch.testing.assert_close(model.weight.grad.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_can_be_kept_for_a_second_backward(device):
    model, expected = model_and_gradient(device, scale=2)
    for _ in range(2):  # the second time the capture comes from the cache
        model.zero_grad()
        loss = compiled(model)(RAMP.to(device)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        torch.testing.assert_close(model.weight.grad.cpu(), expected)
        torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_of_a_gradient_is_an_error_and_never_silently_left_out(device):
    x = torch.ones(3, device=device).requires_grad_()
    y = compiled(lambda x: (x**3).sum())(x)
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    assert gradient.tolist() == [3, 3, 3]
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        (y + gradient.square().sum()).backward()


@pytest.mark.parametrize("device", DEVICES)
def test_writing_to_an_input_that_its_backward_needs_is_an_error_or_harmless(device):
    w, x = torch.ones(4, 2, device=device).requires_grad_(), RAMP.clone().to(device).requires_grad_()
    expected = torch.autograd.grad((x @ w).sin().sum(), (x, w))
    y = compiled(lambda x, w: (x @ w).sin())(x, w).sum()
    with torch.no_grad():
        w.add_(1)
    with contextlib.suppress(RuntimeError):
        for mine, eager in zip(torch.autograd.grad(y, (x, w)), expected, strict=True):
            torch.testing.assert_close(mine, eager)


def test_partial_and_unused_gradients():
    def two(x, y):
        return x.sin(), y.cos()

    for device in DEVICES:
        x, y = (torch.ones(2, device=device).requires_grad_() for _ in range(2))
        first, second = compiled(two)(x, y)
        first.sum().backward(retain_graph=True)
        assert y.grad is None or not y.grad.any()
        second.sum().backward()
        torch.testing.assert_close(y.grad.cpu(), -torch.ones(2).sin())


# Dynamo asks for the .grad of every input.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_hooks_and_inputs_that_are_not_leaves():
    for device in DEVICES:
        leaf, seen = torch.ones(3, device=device).requires_grad_(), []
        middle = leaf * 2
        middle.register_hook(lambda g, seen=seen: seen.append(g.sum().item()))
        compiled(lambda x: (x * x).sum())(middle).backward()
        assert seen == [12]
        assert leaf.grad.tolist() == [8, 8, 8]


def test_updates_in_place_inside_a_differentiated_graph():
    def update(x, w):
        y = x * w
        y.add_(1)
        y[0] = 0
        return y.sin()

    check_gradients_like_eager(update, RAMP.clone().requires_grad_(), (RAMP + 2).requires_grad_())


def test_stances():
    run = compiled(lambda x: x * 2 + 0.75)
    with counted() as counts, torch.compiler.set_stance("force_eager"):
        run(torch.ones(3))
    assert counts.graphs == counts.capture_hits == 0
    with counted() as counts:
        run(torch.ones(3))
    assert counts.graphs + counts.capture_hits == 1
    with counted() as counts, torch.compiler.set_stance("eager_on_recompile"):
        assert run(torch.ones(5)).tolist() == [2.75] * 5
    assert counts.graphs + counts.capture_hits == 0
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        run(torch.ones(7))


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [False])
def test_checkpointing_with_dropout_inside(device, use_reentrant):
    w = torch.randn(8, 8).to(device).requires_grad_()

    def block(x):
        return F.dropout((x @ w).relu(), 0.3).sin()

    x = torch.randn(16, 8).to(device).requires_grad_()
    y = compiled(lambda x: checkpoint(block, x, use_reentrant=use_reentrant))(x)
    gradient, weight_gradient = torch.autograd.grad(y.sum(), (x, w))
    # What the mask was can be read off the result: sin(h/0.7) of what was kept, 0 of what was not.
    eager_x, eager_w = (t.detach().cpu().requires_grad_() for t in (x, w))
    kept = (y.detach().cpu() != 0).float()
    expected = torch.autograd.grad((kept * (eager_x @ eager_w).relu() / 0.7).sin().sum(), (eager_x, eager_w))
    torch.testing.assert_close(gradient.cpu(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_gradient.cpu(), expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", DEVICES)
def test_a_memory_budget_changes_no_gradient(device):
    def deep(x, w):
        return F.dropout(F.dropout((x @ w).relu(), 0.1).sin().exp().cos(), 0.2)

    results = []
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        torch.manual_seed(3)
        x, w = (torch.randn(16, 16).to(device).requires_grad_() for _ in range(2))
        with torch._functorch.config.patch(activation_memory_budget=budget):
            y = compiled(deep)(x, w)
        saved = sum(t.nbytes for t in y.grad_fn.saved_tensors)
        results.append((saved, y, *torch.autograd.grad(y.sum(), (x, w))))
    for _, *tensors in results[1:]:
        for mine, expected in zip(tensors, results[0][1:], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    assert results[2][0] < results[0][0], "the budget had no effect"


def of_cond(x):
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def of_while_loop(x):
    from torch._higher_order_ops import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (x.new_zeros((), dtype=torch.int64), x))[1]


def of_scan(x):
    from torch._higher_order_ops import scan

    return scan(lambda carry, x: (carry + x, carry * x), x.new_zeros(4), x)[1]


def of_flex_attention(x):
    q = x.reshape(1, 1, 3, 4)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + i)


@pytest.mark.quick("cond", "while_loop", "scan")
@pytest.mark.parametrize(
    ("fn", "name"),
    [(of_cond, "cond"), (of_while_loop, "while_loop"), (of_scan, "scan"), (of_flex_attention, "flex_attention")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_control_flow_is_refused_by_name(fn, name):
    # Lowering one of them makes its case here fail: then it belongs to the tests of results.
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(fn)(RAMP)
    assert isinstance(raised.value.inner_exception, XLACompilationError)
    assert f"the higher-order operator {name} has no lowering to XLA here (at {__file__}:" in str(raised.value)
    assert "torch.compiler.disable" in str(raised.value)


REGIONS = {
    "region": lambda kind, x, w: _in_region(kind, x, w),
    "disabled inside": lambda kind, x, w: _in_region(kind, x, w, inner=False),
}


def _in_region(kind, x, w, inner=True):
    with torch.autocast(kind, torch.bfloat16):
        y = x @ w
        with torch.autocast(kind, torch.bfloat16, enabled=inner):
            z = x @ w
    return y, z, x @ w, y.float().softmax(-1)


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
def test_autocast_regions_count_for_the_device_they_name(kind, region):
    for device in DEVICES:
        x, w = RAMP.to(device), RAMP.t().contiguous().to(device)
        eager = region(kind, RAMP, RAMP.t()) if kind == device == "cpu" else region(kind, x, w)
        mine = compiled(lambda x, w: region(kind, x, w))(x, w)
        assert [m.dtype for m in mine] == [e.dtype for e in eager]
        assert (mine[0].dtype == torch.bfloat16) == (kind == device)
        for m, e in zip(mine, eager, strict=True):
            torch.testing.assert_close(m.float().cpu(), e.float().cpu(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kind", DEVICES)
def test_autocast_around_the_call_counts_for_the_device_it_names(kind):
    for device in DEVICES:
        w = RAMP.t().contiguous().to(device).requires_grad_()
        with torch.autocast(kind, torch.bfloat16):
            y = compiled(lambda x, w: x @ w)(RAMP.to(device), w)
        assert y.dtype == (torch.bfloat16 if kind == device else torch.float32)
        y.sum().backward()
        assert w.grad.dtype == torch.float32


MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": contextlib.nullcontext}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_around_and_inside(mode):
    w = RAMP.clone().requires_grad_()
    for fn in (lambda w: w * 2, lambda w: _half_without_gradient(w)):
        with mode():
            mine, eager = compiled(fn)(w), fn(w)
        assert (mine.requires_grad, mine.is_inference()) == (eager.requires_grad, eager.is_inference())
        torch.testing.assert_close(mine, eager)
        if mine.requires_grad:
            torch.testing.assert_close(torch.autograd.grad(mine.sum(), w), torch.autograd.grad(eager.sum(), w))


def _half_without_gradient(w):
    with torch.no_grad():
        constant = w * 3
    return constant * w


class BackwardOnCpu(torch.autograd.Function):
    """x * 2, whose backward needs an operator that XLA lacks."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.mode(1, keepdim=True).values


# torch 2.9: Dynamo makes an instance of every autograd.Function it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_an_error_in_the_backward_comes_with_the_call_that_compiles_it():
    assert compiled(lambda x: BackwardOnCpu.apply(x), strict=True)(RAMP).shape == (3, 4)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"strict=True.*mode") as raised:
        compiled(lambda x: BackwardOnCpu.apply(x), strict=True)(RAMP.clone().requires_grad_())
    assert isinstance(raised.value.inner_exception, XLACompilationError)
