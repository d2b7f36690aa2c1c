"""Integer operators that XLA or torch_xla 2.9 does not support: wrapped numbers, large exponents, shifts of all bits.

In ATen, 300 is 44 in int8, and -1 is 255 in uint8. torch_xla fails to lower operators with such numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import is_integer, operands, wrapped

aten = torch.ops.aten

_KNOWN_BITS = 6  # the bits of an exponent that XLA reads


def _with_wrapped(op: Any) -> Callable[..., Any]:
    """`op` for a tensor and a number, which is wrapped to the tensor's dtype."""
    return lambda x, number, *args: op(x, wrapped(number, x.dtype), *args)


def integer_power(base: torch.Tensor, exponent: int) -> torch.Tensor:
    """`base ** exponent`, for exponents above 63."""
    result = None
    while exponent:
        if exponent & 1:
            result = base if result is None else result * base
        base, exponent = base * base, exponent >> 1
    assert result is not None
    return result


def _power(x: Any, y: Any) -> torch.Tensor:
    """For integers, square the base for each bit of the exponent that XLA does not read.

    With a negative exponent, the result is 0 unless the base is 1 or -1.
    """
    if not is_integer(torch.result_type(x, y)):
        return (aten.pow.Tensor_Tensor if isinstance(x, torch.Tensor) else aten.pow.Scalar)(x, y)  # type: ignore[no-any-return]
    base, exponent, dtype = operands(x, y)
    info = torch.iinfo(dtype)
    result, square = aten.pow.Tensor_Tensor(base, exponent & 2**_KNOWN_BITS - 1), integer_power(base, 2**_KNOWN_BITS)
    for bit in range(_KNOWN_BITS, info.bits - (info.min < 0)):
        result = torch.where(exponent & 2**bit != 0, result * square, result)
        square = square * square
    inverse = torch.where(base == 1, 1, torch.where(base == -1, 1 - 2 * (exponent & 1), 0))
    return torch.where(exponent < 0, inverse, result).to(dtype)


def _is_infinite(op: Any, x: torch.Tensor) -> Any:
    """torch_xla casts the infinity to the integer dtype, so the smallest integer counts as -inf."""
    return op(x) if x.dtype.is_floating_point else torch.zeros_like(x, dtype=torch.bool)


def _left_shift(x: Any, y: Any) -> torch.Tensor:
    """0 if all bits are shifted out, or the shift is negative."""
    x, bits, dtype = operands(x, y)
    is_kept = (bits >= 0) & (bits < torch.iinfo(dtype).bits)
    return torch.where(is_kept, x * aten.pow.Scalar(2, torch.where(is_kept, bits, 0)), 0)


INTEGER_FORMS: dict[Any, Callable[..., Any]] = {
    **{op: partial(_is_infinite, op) for op in (aten.isneginf.default, aten.isposinf.default)},
    aten.pow.Tensor_Tensor: _power,
    aten.pow.Scalar: _power,
    **{op: _with_wrapped(op) for op in (aten.rsub.Scalar, aten.fmod.Scalar)},
    **dict.fromkeys(
        (
            aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar,
            aten.bitwise_left_shift.Scalar_Tensor, aten.__lshift__.Tensor, aten.__lshift__.Scalar,
        ),
        _left_shift,
    ),
}  # fmt: skip
