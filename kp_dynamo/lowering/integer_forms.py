"""Operators of integers that torch_xla 2.9 or XLA carries out otherwise than ATen at the ends of their ranges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kp_dynamo.lowering.elementwise_forms import operands

aten = torch.ops.aten

_LEFT_SHIFTS = (
    aten.bitwise_left_shift.Tensor,
    aten.bitwise_left_shift.Tensor_Scalar,
    aten.bitwise_left_shift.Scalar_Tensor,
    aten.__lshift__.Tensor,
    aten.__lshift__.Scalar,
)


def _is_infinite(op: Any, x: torch.Tensor) -> Any:
    """torch_xla casts the infinity to the integer: its least number is -inf."""
    return op(x) if x.dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)


def _pow(op: Any, x: Any, y: Any) -> Any:
    """ATen squares as often as the exponent has bits, and wraps; XLA ends after six, and has no negative exponents."""
    base, exponent, dtype = operands(x, y)
    if dtype.is_floating_point or dtype.is_complex:
        return op(x, y)
    result, square = torch.ones_like(base), base
    for bit in range(torch.iinfo(dtype).max.bit_length()):
        result = torch.where(exponent & (1 << bit) != 0, result * square, result)
        square = square * square
    inverse = torch.where(base == 1, 1, torch.where(base == -1, 1 - 2 * (exponent & 1), 0))
    return torch.where(exponent < 0, inverse, result).to(dtype)


def _left_shift(x: Any, bits: Any) -> Any:
    """torch_xla multiplies by a power of two, which wraps where ATen has shifted everything out."""
    x, bits, dtype = operands(x, bits)
    if dtype.is_floating_point:
        return aten.bitwise_left_shift.Tensor(x, bits)
    is_inside = (bits >= 0) & (bits < torch.iinfo(dtype).bits)
    return torch.where(is_inside, aten.bitwise_left_shift.Tensor(x, torch.where(is_inside, bits, 0)), 0)


INTEGER_FORMS: dict[Any, Callable[..., Any]] = {
    **{op: partial(_is_infinite, op) for op in (aten.isneginf.default, aten.isposinf.default)},
    **{op: partial(_pow, op) for op in (aten.pow.Tensor_Tensor, aten.pow.Scalar)},
    **dict.fromkeys(_LEFT_SHIFTS, _left_shift),
}
