"""Comparisons with a number, which is rounded to the tensor's dtype first, and what is made of them: as eager."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.spine import check_gradients_like_eager, check_like_eager

NUMBERS = (0.1, 0.3, 0.7, -0.3)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
AT_A_NUMBER = {
    "where": lambda x, v: torch.where(x > v, x * 2, x),
    "threshold": lambda x, v: F.threshold(x, v, 9.0),
    "hardshrink": lambda x, v: F.hardshrink(x, abs(v)),
    "softshrink": lambda x, v: F.softshrink(x, abs(v)),
    "hardtanh": lambda x, v: F.hardtanh(x, v, v + 1),
    "clamp": lambda x, v: x.clamp(v, v + 1),
    "clamp from below": lambda x, v: x.clamp(min=v),
    "clamp from above": lambda x, v: x.clamp(max=v),
    "softplus": lambda x, v: F.softplus(x, 1.0, v),
    "smooth_l1_loss": lambda x, v: F.smooth_l1_loss(x, x.detach() * 0, beta=abs(v), reduction="none"),
    "huber_loss": lambda x, v: F.huber_loss(x, x.detach() * 0, delta=abs(v), reduction="none"),
    "masked_fill": lambda x, v: x.masked_fill(x == v, 5.0),
}


def around(number, dtype):
    """The number in `dtype`, and its neighbours."""
    x = torch.full((3,), number, dtype=dtype)
    x[1:] = torch.stack([x[1] * (1 - torch.finfo(dtype).eps * 2), x[2] * (1 + torch.finfo(dtype).eps * 2)])
    return x


@pytest.mark.quick("torch.float32", "torch.float16")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_compared_in_their_own_dtype(dtype):
    def fn(*tensors):
        return [compare(x, v) for x, v in zip(tensors, NUMBERS, strict=True) for compare in COMPARISONS]

    check_like_eager(fn, *(around(v, dtype) for v in NUMBERS))


def test_integers_and_fractions_are_compared_in_float32():
    numbers = (16777216.0, 16777217.0, 0.5, -7.5)

    def fn(x):
        return [compare(x, v) for v in numbers for compare in COMPARISONS]

    for dtype in (torch.int64, torch.int32):
        check_like_eager(fn, torch.tensor([16777216, 16777217, 0, 1, -7, -8], dtype=dtype))


@pytest.mark.quick("where", "hardshrink", "softshrink", "hardtanh", "clamp", "smooth_l1_loss", "softplus")
@pytest.mark.parametrize("name", AT_A_NUMBER)
def test_both_sides_of_a_number(name):
    fn = AT_A_NUMBER[name]
    check_gradients_like_eager(
        lambda *tensors: torch.cat([fn(x, v) for x, v in zip(tensors, NUMBERS, strict=True)]),
        *(around(v, torch.float32).requires_grad_() for v in NUMBERS),
    )


@pytest.mark.quick(
    "threshold-torch.bfloat16", "hardshrink-torch.bfloat16", "hardtanh-torch.float16", "clamp-torch.bfloat16",
    "softplus-torch.float16",
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["threshold", "hardshrink", "hardtanh", "clamp", "softplus"])
def test_both_sides_in_narrow_dtypes(name, dtype):
    fn = AT_A_NUMBER[name]
    check_like_eager(
        lambda *tensors: [fn(x, v) for x, v in zip(tensors, NUMBERS, strict=True)],
        *(around(v, dtype) for v in NUMBERS),
    )


@pytest.mark.quick("torch.float32-trunc", "torch.bfloat16-floor", "torch.float16-trunc", "torch.float64-floor")
@pytest.mark.parametrize("mode", ["floor", "trunc"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_divisor_is_not_rounded_to_a_narrow_dtype(dtype, mode):
    check_like_eager(
        lambda *tensors: [torch.div(x, v, rounding_mode=mode) for x, v in zip(tensors, NUMBERS, strict=True)],
        *(around(v, dtype) for v in NUMBERS),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_quotient_is_rounded_before_it_is_truncated(dtype):
    """1.5 / 0.3 is 5 in float16, of whose numbers it is the nearest, and 4.999 in float32."""
    x, y = torch.tensor([1.5, 7.5, -1.5], dtype=dtype), torch.tensor([0.3, 0.3, 0.3], dtype=dtype)
    check_like_eager(lambda x, y: torch.div(x, y, rounding_mode="trunc"), x, y)
    check_like_eager(lambda x, y: torch.div(x, y[0], rounding_mode="trunc"), x, y)  # a single divisor: 4
    check_like_eager(lambda x, y: torch.div(x[:1], y[:1], rounding_mode="trunc"), x, y)
