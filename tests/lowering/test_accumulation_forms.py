"""Reductions of float16 and bfloat16 numbers accumulate in float32 and round once, as eager's kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kp_dynamo import mark_sequence
from tests.spine import assert_same, check_like_eager, compiled, counted

NARROW = [torch.bfloat16, torch.float16]

ROWS = torch.linspace(0.0, 0.1, 8 * 9000).reshape(8, 9000)
FACTORS = 1 + 0.01 * torch.arange(8 * 500).sin().reshape(8, 500)
IMAGES = 100 + torch.linspace(0.0, 0.1, 3 * 64 * 64).reshape(1, 3, 64, 64)
PLACES = torch.arange(9000) % 4
CLASSES = torch.arange(4 * 40 * 40).reshape(4, 40, 40) % 10
SCORES = torch.arange(4 * 10 * 40 * 40).cos().reshape(4, 10, 40, 40) * 0.1 - 1

CASES: dict[str, tuple[Callable, torch.Tensor]] = {
    "mean": (lambda x: x.mean(), ROWS),
    "mean of rows": (lambda x: x.mean(1, keepdim=True), ROWS + 10),
    "sum": (lambda x: (x.sum(), x.sum(0), x.sum(1, dtype=torch.float32)), ROWS * 10),
    "nansum and nanmean": (lambda x: (x.nansum(1), x.nanmean(1)), ROWS),
    "trapezoid": (lambda x: (torch.trapezoid(x, dim=1), torch.cumulative_trapezoid(x, dim=1)), ROWS),
    "cumsum": (lambda x: x.cumsum(1), ROWS),
    "prod": (lambda x: (x.prod(1), x[0].prod()), FACTORS),
    "cumprod": (lambda x: x.cumprod(1), FACTORS),
    "var and std": (lambda x: (x.var(1), x.std(), x.var(0, correction=0)), ROWS + 10),
    "with the mean": (lambda x: (*torch.var_mean(x, 1), *torch.std_mean(x, 1)), ROWS + 10),
    "norms": (lambda x: (x.norm(), torch.linalg.vector_norm(x, 1, 1), torch.linalg.vector_norm(x, 3, 1)), ROWS * 1000),
    "number of nonzeros": (lambda x: torch.linalg.vector_norm(x, 0, 1), ROWS + 0.2),
    "dist": (lambda x: torch.dist(x, x.flip(1), 1), ROWS),
    "average pooling": (lambda x: (F.avg_pool2d(x, 32), F.avg_pool1d(x[0], 64)), IMAGES),
    "padded average pooling": (lambda x: F.avg_pool2d(x, 32, padding=4, count_include_pad=False), IMAGES),
    "adaptive average pooling": (lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, 2)), IMAGES),
    "area": (lambda x: F.interpolate(x, size=(2, 2), mode="area"), IMAGES),
    "mean of squares": (lambda x: F.mse_loss(x, x.flip(1)), ROWS * 30),
    "sum of squares": (lambda x: F.mse_loss(x, x.flip(1), reduction="sum"), ROWS),
    "l1": (lambda x: F.l1_loss(x, x.flip(1)), ROWS),
    "smooth l1": (lambda x: F.smooth_l1_loss(x, x.flip(1)), ROWS * 10),
    "huber": (lambda x: F.huber_loss(x, x.flip(1)), ROWS * 10),
    "binary cross entropy": (lambda x: F.binary_cross_entropy(x, x.flip(1)), ROWS * 9 + 0.05),
    "with logits": (lambda x: F.binary_cross_entropy_with_logits(x, x.flip(1)), ROWS * 9 + 0.05),
    "with logits, summed": (
        lambda x: F.binary_cross_entropy_with_logits(x, x.flip(1), pos_weight=x[0], reduction="sum"), ROWS,
    ),
    "negative log likelihood": (lambda x: F.nll_loss(x, CLASSES), SCORES),
    "softmax": (lambda x: (x.softmax(1), x.log_softmax(1)), ROWS),
    "index_add": (lambda x: x.new_zeros(4, 8).index_add(0, PLACES, x.t()), ROWS),
    "scatter_reduce": (
        lambda x: (
            x.new_zeros(8, 4).scatter_reduce(1, PLACES[:500].expand(8, -1), x, "sum"),
            x.new_ones(8, 4).scatter_reduce(1, PLACES[:500].expand(8, -1), x, "prod"),
            x.new_zeros(8, 4).scatter_reduce(1, PLACES[:500].expand(8, -1), x, "amax"),
            x.new_zeros(8, 4).scatter(1, PLACES.expand(8, -1), 0.5, reduce="add"),
        ),
        FACTORS * 3,
    ),
    "scatter_add": (lambda x: x.new_zeros(8, 4).scatter_add(1, PLACES.expand(8, -1), x), ROWS),
}  # fmt: skip


def _tuple(result: object) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)  # type: ignore[return-value]


def _check_as_near_as_eager(mine: object, eager: object, exact: object) -> None:
    """Two roundings of the largest element, or twice eager's distance: some are taken apart into several operators."""
    for got, wanted, true in zip(_tuple(mine), _tuple(eager), _tuple(exact), strict=True):
        assert got.dtype == wanted.dtype
        largest, unit = true.abs().max(), torch.finfo(got.dtype).eps / 2
        bound = torch.maximum(2 * unit * largest, 2 * (wanted.double() - true).abs().max())
        assert (got.double() - true).abs().max() <= bound


@pytest.mark.quick(
    "mean-torch.bfloat16", "nansum and nanmean-torch.bfloat16", "trapezoid-torch.bfloat16", "cumsum-torch.bfloat16",
    "prod-torch.bfloat16", "var and std-torch.bfloat16", "norms-torch.bfloat16", "number of nonzeros-torch.bfloat16",
    "average pooling-torch.bfloat16", "adaptive average pooling-torch.bfloat16", "sum of squares-torch.bfloat16",
    "smooth l1-torch.bfloat16", "with logits, summed-torch.bfloat16", "negative log likelihood-torch.bfloat16",
    "softmax-torch.bfloat16", "index_add-torch.bfloat16", "scatter_reduce-torch.bfloat16",
)  # fmt: skip
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_reduction_is_as_near_as_eager(name, dtype):
    fn, x = CASES[name][0], CASES[name][1].to(dtype)
    _check_as_near_as_eager(compiled(lambda x: fn(x))(x), fn(x), fn(x.double()))


@pytest.mark.parametrize("options", [{}, {"precision": "float32"}, {"level": "aggressive"}], ids=str)
def test_sums_that_float16_cannot_hold_have_means(options):
    mean = torch.compile(lambda x: x.mean(), backend="kp_tpu", options=options)
    for value, size in ((100.0, 4096), (0.0125, 80000), (1.0, 70000)):
        x = torch.full((size,), value).half()
        assert mean(x) == x.mean()


def test_a_sum_past_the_range_is_infinite():
    x = torch.full((4096,), 100.0).half()
    assert_same(compiled(lambda x: (x.sum(), x.cumsum(0)[-1], x.sum(dtype=torch.float32)))(x), (
        torch.tensor(math.inf).half(), torch.tensor(math.inf).half(), torch.tensor(409600.0),
    ))  # fmt: skip


def test_elements_of_a_loss_overflow_as_in_eager():
    x, y = torch.tensor([300.0, *[0.0] * 99]).half(), torch.zeros(100).half()
    assert F.mse_loss(x, y).isinf()
    assert compiled(lambda x, y: F.mse_loss(x, y))(x, y).isinf()


@pytest.mark.quick("mean")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_of_a_loss_with_more_elements_than_float16_counts(reduction):
    x = torch.linspace(0.1, 0.9, 70000).half()

    def gradient(run):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(run(leaf), leaf)[0]

    def loss(x):
        return F.binary_cross_entropy(x, 1 - x.detach(), reduction=reduction)

    eager = gradient(loss)
    assert eager.abs().max() > 0
    torch.testing.assert_close(gradient(compiled(loss)), eager, rtol=torch.finfo(x.dtype).eps, atol=2**-24)


GRADIENTS: dict[str, tuple[Callable, list[torch.Tensor]]] = {
    "linear": (F.linear, [torch.randn(16384, 4), torch.randn(3, 4), torch.randn(3)]),
    "bias of a convolution": (
        lambda x, w, b: F.conv2d(x.detach(), w.detach(), b) + 0 * (x.sum() + w.sum()),
        [torch.randn(16, 3, 32, 32), torch.randn(4, 3, 3, 3), torch.randn(4)],
    ),
    "bias of a transposed convolution": (
        lambda x, w, b: F.conv_transpose2d(x.detach(), w.detach(), b) + 0 * (x.sum() + w.sum()),
        [torch.randn(16, 3, 32, 32), torch.randn(3, 4, 3, 3), torch.randn(4)],
    ),
    "addition": (lambda x, y: x + y, [torch.randn(20000, 4), torch.randn(4)]),
    "embedding": (lambda w: F.embedding(PLACES, w), [torch.randn(4, 8)]),
    "indexing": (lambda w: w[PLACES], [torch.randn(4, 8)]),
    "index_select": (lambda w: w.index_select(0, PLACES), [torch.randn(4, 8)]),
    "gather": (lambda w: w.gather(1, PLACES.expand(8, -1)), [torch.randn(8, 4)]),
    "cumsum": (lambda x: x.cumsum(1), [ROWS * 0.1]),
    "softmax": (lambda x: x.softmax(1), [ROWS]),
    "average pooling": (lambda x: F.avg_pool2d(x, 9, stride=1), [torch.rand(1, 2, 40, 40)]),
}  # fmt: skip


def _gradients(fn: Callable, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = fn(*leaves)
    tangent = (0.01 + torch.arange(result.numel()).reshape(result.shape) % 7 / 64).half().bfloat16().to(result.dtype)
    return torch.autograd.grad(result, leaves, tangent)


@pytest.mark.quick(
    "linear-torch.bfloat16", "bias of a convolution-torch.bfloat16", "addition-torch.bfloat16",
    "indexing-torch.bfloat16", "gather-torch.bfloat16", "cumsum-torch.bfloat16", "softmax-torch.bfloat16",
)  # fmt: skip
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_a_sum_is_as_near_as_eager(name, dtype):
    fn, inputs = GRADIENTS[name][0], [x.to(dtype) for x in GRADIENTS[name][1]]
    mine, eager = _gradients(compiled(lambda *x: fn(*x)), inputs), _gradients(fn, inputs)
    _check_as_near_as_eager(mine, eager, _gradients(fn, [x.double() for x in inputs]))


def test_the_bias_of_a_float32_convolution_at_a_level_that_casts_it():
    inputs = GRADIENTS["bias of a convolution"][1]

    def fn(x, w, b):
        return F.conv2d(x, w, b)

    of_bias = _gradients(torch.compile(fn, backend="kp_tpu", options={"level": "aggressive"}), inputs)[2]
    exact = _gradients(fn, [x.double() for x in inputs])[2]
    assert (of_bias - exact).abs().max() <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.quick("mean", "var and std", "cumsum")
@pytest.mark.parametrize("name", ["mean", "sum", "mean of rows", "var and std", "norms", "cumsum", "softmax", "l1"])
def test_padded_lengths_change_nothing(name):
    fn, x = CASES[name][0], CASES[name][1].half()
    run = torch.compile(lambda x: fn(x), backend="kp_tpu", options={"precision": "float32", "buckets": "pow2"})
    _check_as_near_as_eager(run(mark_sequence(x, 1)), fn(x), fn(x.double()))


def test_the_norms_of_many_tensors():
    many = [torch.full((300, 300), 30.0).half(), torch.full((300,), 30.0).half(), torch.ones(3)]
    assert_same(compiled(lambda *x: torch._foreach_norm(x))(*many), torch._foreach_norm(many))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_a_sum_in_another_dtype(dtype):
    x = torch.arange(200.0).half()
    assert_same(
        compiled(lambda x: (x.sum(dtype=dtype), x.cumsum(0, dtype=dtype), x.sum(0, dtype=dtype)))(x),
        (x.sum(dtype=dtype), x.cumsum(0, dtype=dtype), x.sum(0, dtype=dtype)),
    )


def test_nonzeros_of_float32_are_counted_past_255():
    x = (torch.arange(600.0) % 3).reshape(2, 300)
    assert_same(compiled(lambda x: torch.linalg.vector_norm(x, 0, 1))(x), torch.linalg.vector_norm(x, 0, 1))


@pytest.mark.parametrize("how", [{}, {"reduction": 2}], ids=str)
def test_a_loss_whose_reduction_is_named(how):
    x = ROWS.half()
    loss = torch.ops.aten.mse_loss
    _check_as_near_as_eager(
        compiled(lambda x: loss(x, x.flip(1), **how))(x),
        loss(x, x.flip(1), **how),
        loss(x.double(), x.double().flip(1), **how),
    )


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter with Tensor src is deprecated")
def test_tensors_that_scatter_adds():
    def added(x):
        return x.new_zeros(8, 4).scatter(1, PLACES.expand(8, -1), x, reduce="add")

    x = ROWS.bfloat16()
    _check_as_near_as_eager(compiled(added)(x), added(x), added(x.double()))


def test_float32_keeps_its_program():
    from kp_dynamo.lowering.accumulation_forms import in_float32

    def reduced(x, *args, **kwargs):
        return x

    x = torch.ones(4)
    assert in_float32(torch.ops.aten.sum.default, reduced)(x) is x
    assert in_float32(torch.ops.aten.mul.Tensor, reduced) is reduced


def test_products_stay_zero_after_a_zero():
    """XLA multiplies blocks, and 1000 tens overflow."""
    tens = torch.cat([torch.tensor([2.0, -0.0]), torch.full((1000,), 10.0), torch.tensor([-3.0])])
    with counted() as counts:
        check_like_eager(lambda x: (x.cumprod(0), 1 / x.cumprod(0)), tens)
    assert counts.fallbacks == 0
    check_like_eager(lambda x: (x.cumprod(0), x.cumprod(1), x.double().cumprod(1)), torch.arange(3000.0).reshape(2, -1))


def test_a_product_is_nan_where_infinity_meets_zero():
    inf, nan = float("inf"), float("nan")
    rows = [[1, 0, inf, 2], [inf, 0, 1, 2], [0, 2, nan, 3], [3e38, 3e38, 0, 1], [nan, 0, 1, 2], [0, 1, 0, -2]]
    check_like_eager(lambda x: (x.cumprod(1), x.cumprod(0)), torch.tensor(rows))
    large = torch.tensor([1e300, 1e300, 0, 1], dtype=torch.float64)
    check_like_eager(lambda x: x.cumprod(0), large)
