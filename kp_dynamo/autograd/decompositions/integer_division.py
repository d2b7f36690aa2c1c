"""Exact division of integers. torch_xla 2.9 divides them as float32, which is wrong from 2^25 on.

It also shifts negative numbers right by dividing, which rounds towards zero; ATen's arithmetic shift rounds down.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def div_mode(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """`aten.div.*_mode` of integers, rounded towards zero ("trunc") or down ("floor")."""
    if rounding_mode is None or not _are_integers(x, y):
        return NotImplemented
    return _floor(x, y) if rounding_mode == "floor" else _trunc(*_tensors(x, y))


def floor_divide(x: Any, y: Any) -> Any:
    """`aten.floor_divide` of integers."""
    return _floor(x, y) if _are_integers(x, y) else NotImplemented


RIGHT_SHIFTS = (
    aten.bitwise_right_shift.Tensor,
    aten.bitwise_right_shift.Tensor_Scalar,
    aten.bitwise_right_shift.Scalar_Tensor,
    aten.__rshift__.Tensor,
    aten.__rshift__.Scalar,
)


def right_shift(x: Any, bits: Any) -> Any:
    """`x >> bits`: for a negative x, divide the complement, ~(~x / 2^bits), which rounds down.

    ATen fills with the sign if `bits` exceeds the width of the dtype or is negative.
    """
    wide_x, wide_bits, dtype = _tensors(x, bits)
    is_negative = wide_x < 0
    positive = torch.where(is_negative, ~wide_x, wide_x)
    shifted = _trunc(positive, torch.ones_like(wide_bits) << wide_bits.clamp(0, 62), torch.int64)
    shifted = torch.where((wide_bits >= 0) & (wide_bits < 63), shifted, 0)
    return torch.where(is_negative, ~shifted, shifted).to(dtype)


def _are_integers(x: Any, y: Any) -> bool:
    return all(_is_integer(v) for v in (x, y)) and any(isinstance(v, torch.Tensor) for v in (x, y))


def _is_integer(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.dtype.is_floating_point and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _tensors(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Both in int64, and the dtype of the quotient."""
    dtype = torch.result_type(x, y)
    like = x if isinstance(x, torch.Tensor) else y
    # Via the common dtype, in which a number wraps as in ATen.
    tensors = [v if isinstance(v, torch.Tensor) else torch.full((), v, device=like.device) for v in (x, y)]
    return tensors[0].to(dtype).long(), tensors[1].to(dtype).long(), dtype


def _trunc(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The quotient in float64, refined by the quotient of the remainder, then corrected by one.

    float64 has 53 bits: the first quotient of two 64-bit integers is off by at most 2^11. Its remainder fits, and the
    quotient of that is off by at most one.
    """
    quotient = torch.zeros_like(x)
    for _ in range(2):
        rest = x - quotient * y
        quotient = quotient + (rest.double() / y.double()).trunc().long()
    rest = x - quotient * y
    is_over = (rest != 0) & ((rest < 0) != (x < 0))
    is_under = ~is_over & (rest.abs() >= y.abs())
    step = torch.where((x < 0) == (y < 0), 1, -1)
    return (quotient + torch.where(is_under, step, 0) - torch.where(is_over, step, 0)).to(dtype)


def _floor(x: Any, y: Any) -> torch.Tensor:
    wide_x, wide_y, dtype = _tensors(x, y)
    quotient = _trunc(wide_x, wide_y, torch.int64)
    rest = wide_x - quotient * wide_y
    return (quotient - ((rest != 0) & ((rest < 0) != (wide_y < 0))).long()).to(dtype)
