"""kp::linear_cross_entropy: its values and gradients by blocks, extremes, what it refuses, what it is counted as."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kp_dynamo.backend import kp_tpu
from kp_dynamo.ops import ACTIVATIONS  # noqa: F401  # registers the operators

forward, backward = torch.ops.kp.linear_cross_entropy, torch.ops.kp.linear_cross_entropy_backward


def operands(rows: int, width: int, classes: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """x, weight, bias and the gradient of the loss, in float64 the same numbers as in `dtype`."""
    generator = torch.Generator().manual_seed(rows + width + classes)
    sizes = (rows, width), (classes, width), (classes,), (rows,)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def exact(x, weight, bias, grad, target):
    """The losses and gradients of torch in float64."""
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    loss = F.cross_entropy(F.linear(*leaves), target, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, leaves, grad.double())


@pytest.mark.parametrize(("scale", "cap"), [(0.5, 0.0), (1.0, 3.0), (-2.0, 0.7)])
def test_logits_are_scaled_and_capped(scale, cap):
    x, weight, bias, grad = operands(6, 8, 50)
    target = torch.arange(6)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*leaves) * scale
    loss = F.cross_entropy(cap * torch.tanh(logits / cap) if cap else logits, target, reduction="none")
    result, statistics, *_ = forward(*(t.detach() for t in leaves), target, scale, cap, 16)
    torch.testing.assert_close(result, loss.detach())
    found = backward(grad, *(t.detach() for t in leaves), target, scale, cap, 16, statistics)
    for one, other in zip(found, torch.autograd.grad(loss, leaves, grad), strict=True):
        torch.testing.assert_close(one, other)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 7), width=st.integers(1, 6), classes=st.integers(1, 23), block=st.integers(1, 30),
    has_bias=st.booleans(),
)  # fmt: skip
def test_every_block_size_gives_torchs_loss_and_gradients(rows, width, classes, block, has_bias):
    x, weight, bias, grad = operands(rows, width, classes)
    bias = bias if has_bias else torch.zeros_like(bias)
    target = torch.arange(rows) * 5 % classes
    loss, gradients = exact(x, weight, bias, grad, target)
    given_bias = bias if has_bias else None
    result, statistics, *_ = forward(x, weight, given_bias, target, 1.0, 0.0, block)
    torch.testing.assert_close(result, loss)
    found = backward(grad, x, weight, given_bias, target, 1.0, 0.0, block, statistics)
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other)


def smoothed(leaves, target, weights, share=0.25):
    """Torch's losses with smoothed labels, without a reduction, and without the factor of the second loss."""
    logits = F.linear(*leaves)
    plain = F.cross_entropy(logits, target, weight=weights, reduction="none")
    both = F.cross_entropy(logits, target, weight=weights, reduction="none", label_smoothing=share)
    return plain, (both - (1 - share) * plain) * len(weights) / share


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 7), classes=st.integers(1, 23), block=st.integers(1, 30), mean=st.sampled_from([0.0, 1000.0]),
    weights=st.sampled_from(["ones", "different", "zeros"]),
)  # fmt: skip
def test_the_second_loss_of_label_smoothing_and_its_gradients(rows, classes, block, mean, weights):
    x, weight, bias, grad = operands(rows, 3, classes)
    bias, target = bias + mean, torch.arange(rows) * 5 % classes
    weights = {"ones": torch.ones, "different": torch.arange, "zeros": torch.zeros}[weights](classes).double()
    smooth_grad = grad.flip(0) * 2
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    _, smooth = smoothed(leaves, target, weights)
    plain = F.cross_entropy(F.linear(*leaves), target, reduction="none")
    expected = torch.autograd.grad([plain, smooth], leaves, [grad, smooth_grad])
    detached = [t.detach() for t in leaves]
    loss, statistics, second, _ = forward(*detached, target, 1.0, 0.0, block, weights)
    torch.testing.assert_close(loss, plain.detach())
    torch.testing.assert_close(second, smooth.detach(), rtol=1e-9, atol=1e-9)
    found = backward(grad, *detached, target, 1.0, 0.0, block, statistics, weights, smooth_grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("scale", "cap"), [(1.0, 0.0), (-2.0, 0.7)])
@pytest.mark.parametrize("block", [5, 50])
def test_the_log_sum_exp_and_its_gradient_beside_the_loss(block, scale, cap, smooth):
    x, weight, bias, grad = operands(6, 8, 50)
    target, lse_grad = torch.arange(6), grad.flip(0) * 2
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*leaves) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    losses = [F.cross_entropy(logits, target, reduction="none"), logits.logsumexp(1)]
    sums = [-F.log_softmax(logits, 1).sum(1)] if smooth else []
    expected = torch.autograd.grad(losses + sums, leaves, [grad, lse_grad, grad + 1][: 2 + smooth])
    detached = [t.detach() for t in leaves]
    weights = torch.ones(50, dtype=torch.float64) if smooth else None
    _, statistics, *_ = forward(*detached, target, scale, cap, block, weights)
    torch.testing.assert_close(statistics.sum(0), losses[1].detach())
    second = (weights, grad + 1 if smooth else None)
    found = backward(grad, *detached, target, scale, cap, block, statistics, *second, lse_grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_the_second_loss_of_extreme_rows_is_eagers(value):
    x, weight, bias, _ = operands(6, 8, 12)
    for everywhere in (False, True):
        bias[:] = value if everywhere else bias
        bias[3] = value
        eager = -F.log_softmax(F.linear(x, weight, bias), -1).sum(-1)
        _, _, second, _ = forward(x, weight, bias, torch.arange(6), 1.0, 0.0, 4, torch.ones(12, dtype=torch.float64))
        torch.testing.assert_close(second, eager, equal_nan=True)


@pytest.mark.quick("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_accumulated_in_float32_on_either_device(dtype):
    x, weight, bias, grad = operands(6, 8, 50, dtype)
    target = torch.arange(6)
    loss, gradients = exact(x, weight, bias, grad, target)

    def run(x, weight, bias, grad, target):
        result, statistics, *_ = forward(x, weight, bias, target, 1.0, 0.0, 16)
        return result, *backward(grad, x, weight, bias, target, 1.0, 0.0, 16, statistics)

    for fn in (run, torch.compile(run, backend=kp_tpu, options={"precision": "float32"})):
        result, *found = fn(x, weight, bias, grad, target)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), loss, rtol=1e-6, atol=1e-5)  # 8 products, each of a few units
        for one, other in zip(found, gradients, strict=True):
            # In bfloat16 the gradient of the logits is rounded, and the sum: 2 ** -8 each, of sums of up to 50.
            tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7 * float(other.abs().max())
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=tolerance)


def test_a_gradient_may_be_wider_than_the_operands():
    x, weight, bias, grad = operands(6, 8, 50, torch.bfloat16)
    target = torch.arange(6)
    _, statistics, *_ = forward(x, weight, bias, target, 1.0, 0.0, 16)
    found = backward(grad, x, weight, bias, target, 1.0, 0.0, 16, statistics, out_dtype=torch.float32)
    assert {t.dtype for t in found} == {torch.float32}


def kept_gradients(x, weight, bias, grad, target, *others):
    """The gradients from exponentials that the forward has kept, and those from logits that are computed again."""
    given = x, weight, bias, target, 1.0, 0.0, 16
    loss, statistics, _, exponentials = forward(*given, keep=True)
    kept = backward(grad, *given, statistics, *others, *[None] * (3 - len(others)), exponentials, loss)
    return exponentials, kept, backward(grad, *given, statistics, *others)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 7), width=st.integers(1, 6), classes=st.integers(1, 50), sure=st.booleans())
def test_kept_exponentials_give_the_gradients_with_one_more_rounding(rows, width, classes, sure):
    x, weight, bias, grad = operands(rows, width, classes, torch.bfloat16)
    target = torch.arange(rows) * 5 % classes
    if sure:  # the probability of the target is nearly 1, so its gradient is a small difference
        bias[target] += 9
    _, gradients = exact(x, weight, bias, grad, target)
    exponentials, found, again = kept_gradients(x, weight, bias, grad, target)
    assert (exponentials.shape, exponentials.dtype) == ((rows, classes), torch.bfloat16)
    d_logits = (F.linear(x.double(), weight.double(), bias.double()).softmax(1) - F.one_hot(target, classes)).abs()
    d_logits = d_logits * grad.double().abs()[:, None]
    # An exponential, the gradient of its logit and the result are rounded by 2 ** -9 of their size, each.
    sizes = d_logits @ weight.double().abs(), d_logits.t() @ x.double().abs(), d_logits.sum(0)
    for one, other, true, size in zip(found, again, gradients, sizes, strict=True):
        assert ((one.double() - true).abs() <= 4 * 2.0**-9 * size + 1e-6).all()
        assert one.shape == other.shape


def test_nothing_is_kept_in_float32():
    x, weight, bias, grad = operands(6, 8, 50, torch.float32)
    exponentials, found, again = kept_gradients(x, weight, bias, grad, torch.arange(6))
    assert exponentials.shape == (0,)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("is_all", [False, True])
def test_kept_exponentials_of_extreme_logits(value, is_all):
    x, weight, bias, grad = operands(6, 8, 50, torch.bfloat16)
    bias[slice(None) if is_all else slice(3, 9)] = value
    _, found, again = kept_gradients(x, weight, bias, grad, torch.arange(20, 26))
    for one, other in zip(found, again, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        torch.testing.assert_close(one, other, equal_nan=True, rtol=2.0**-6, atol=2.0**-6)


def test_kept_exponentials_beside_smoothed_labels_and_a_z_loss():
    x, weight, bias, grad = operands(6, 8, 50, torch.bfloat16)
    rows = torch.linspace(-1, 1, 6)
    _, found, again = kept_gradients(x, weight, bias, grad, torch.arange(6), torch.rand(50), rows, rows.flip(0))
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-6 * float(other.abs().max()))


def test_classes_that_are_ruled_out_have_no_probability():
    x, weight, bias, grad = operands(6, 8, 12)
    bias[:5] = -math.inf  # a whole block, and one class of the next
    target = torch.arange(5, 11)
    loss, gradients = exact(x, weight, bias, grad, target)
    result, statistics, *_ = forward(x, weight, bias, target, 1.0, 0.0, 4)
    torch.testing.assert_close(result, loss)
    for one, other in zip(backward(grad, x, weight, bias, target, 1.0, 0.0, 4, statistics), gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_rows_that_have_no_softmax_have_eagers_loss(value):
    x, weight, bias, _ = operands(6, 8, 12)
    bias[:] = value if value < 0 else bias
    bias[3] = value
    target = torch.arange(6)
    result, *_ = forward(x, weight, bias, target, 1.0, 0.0, 4)
    torch.testing.assert_close(
        result, F.cross_entropy(F.linear(x, weight, bias), target, reduction="none"), equal_nan=True
    )


def test_a_sure_and_right_row_keeps_its_small_loss():
    x, weight = torch.tensor([[1e4, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, -12.0], [0.0, 0.0]])
    target = torch.tensor([0])
    loss, *_ = forward(x, weight, None, target, 1.0, 0.0, 2)
    torch.testing.assert_close(
        loss.double(), F.cross_entropy(x.double() @ weight.double().t(), target, reduction="none")
    )
    assert loss > 0  # the sum of the statistics would round it to 0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda x, w, t: (x, w.double(), None, t, 1.0, 0.0, 4), TypeError, "must have the same floating-point dtype"),
        (lambda x, w, t: (x[0], w, None, t, 1.0, 0.0, 4), ValueError, "must have 2, 2 and 1"),
        (lambda x, w, t: (x, w, None, t, 1.0, 0.0, 0), ValueError, "block=0, soft_cap=0.0 are invalid"),
        (lambda x, w, t: (x, w, None, t, 1.0, 0.0, 4, x[0]), ValueError, "one number for each of the 12 classes"),
    ],
)
def test_what_it_refuses(change, error, text):
    x, weight, _, _ = operands(6, 8, 12, torch.float32)
    arguments = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in change(x, weight, torch.arange(6))]
    with pytest.raises(error, match=text):
        forward(*arguments)


def test_it_keeps_nothing_under_a_soft_cap():
    x, weight, *_ = (t.to("meta") for t in operands(6, 8, 12, torch.bfloat16))
    with pytest.raises(ValueError, match=r"keep=True with soft_cap=3\.0, must be 0"):
        forward(x, weight, None, torch.arange(6, device="meta"), 1.0, 3.0, 4, keep=True)


def test_flops_are_those_of_its_matmuls_without_the_recomputed_one():
    x, weight, bias, grad = operands(6, 8, 12)
    with FlopCounterMode(display=False) as counter:
        _, statistics, *_ = forward(x, weight, bias, torch.arange(6), 1.0, 0.0, 4)
        backward(grad, x, weight, bias, torch.arange(6), 1.0, 0.0, 4, statistics)
    assert counter.get_total_flops() == 3 * 2 * 6 * 8 * 12


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 7), parts=st.sampled_from([2, 3, 4]), own=st.integers(1, 9), block=st.integers(1, 40),
    is_smooth=st.booleans(), keeps=st.booleans(),
)  # fmt: skip
def test_classes_in_parts_are_the_same_classes(rows, parts, own, block, is_smooth, keeps):
    classes, dtype = parts * own, torch.bfloat16 if keeps else torch.float64
    x, weight, bias, grad = operands(rows, 6, classes, dtype)
    target = torch.arange(rows) * 5 % classes
    smooth = (torch.rand(classes, dtype=torch.float32 if keeps else torch.float64),) if is_smooth else (None,)
    head = (x, weight, bias, target, 0.5, 0.0, block)
    whole, divided = (forward(*head, *smooth, keep=keeps, parts=n) for n in (1, parts))
    for one, other in zip(divided, whole, strict=True):
        torch.testing.assert_close(one, other)
    loss, statistics, smooth_loss, exponentials = whole
    rest = (statistics, *smooth, smooth_loss if is_smooth else None, None, exponentials if keeps else None, loss)
    whole, divided = (backward(grad, *head, *rest, parts=n) for n in (1, parts))
    for one, other in zip(divided, whole, strict=True):
        torch.testing.assert_close(one, other)


def test_parts_that_do_not_divide_the_classes_are_refused():
    x, weight, bias, _ = operands(3, 4, 10)
    with pytest.raises(ValueError, match="parts=4 is invalid for 10 classes"), FakeTensorMode() as mode:
        forward(*(mode.from_tensor(t) for t in (x, weight, bias, torch.arange(3))), 1.0, 0.0, 8, parts=4)
