"""Casts as ATen performs them on x86, where XLA's own are others: out of the range of an integer, and of booleans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.compat import xla

aten = torch.ops.aten


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`.

    1. A float becomes an integer of 32 or 64 bits, of which a narrower one keeps the low bits: -1.2 is 255 in uint8.
       XLA takes the nearest integer of the narrow dtype, 0.
    2. A boolean becomes 1 or 0 by a choice: XLA makes a choice of a product with a converted boolean, `where(b, x, 0)`,
       which drops an infinity or a NaN that a product with 0 keeps.
    3. Of a complex number both parts decide whether it is true; XLA asks the real one.
    """
    if x.is_complex() and dtype == torch.bool:
        return x != 0
    if x.is_complex() and not dtype.is_complex:
        x = x.real
    if x.dtype.is_floating_point and is_integer(dtype):
        return _whole(x, dtype)
    if x.dtype == torch.bool and dtype.is_floating_point:
        return torch.where(x, _number(1, dtype, x), _number(0, dtype, x))
    return x.to(dtype)


def _whole(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What x86 has no integer for, too large, infinite or NaN, is the least one."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    way = torch.int64 if _takes_64_bits(x.dtype, dtype) else torch.int32
    least = torch.iinfo(way).min
    # A choice between the casts also keeps XLA from making one of them. Below the least it gives the least itself.
    return torch.where(wide < -float(least), wide.to(way), _number(least, way, x)).to(dtype)


def as_held(value: Any, dtype: torch.dtype | None) -> Any:
    """A number as `torch.full` is to take it: torch_xla 2.9 truncates it to an integer before it becomes a boolean."""
    return bool(value) if dtype == torch.bool else value


def _number(value: float, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), as_held(value, dtype), dtype=dtype, device=like.device)


def _takes_64_bits(source: torch.dtype, dtype: torch.dtype) -> bool:
    """c10/util/TypeCast.h casts to uint8 through int64, whose low byte a float32 outside of int32 has no bits in."""
    return dtype in (torch.int64, torch.uint32, torch.uint64) or (dtype == torch.uint8 and source == torch.float64)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether it is one of integers; booleans are none."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def wrapped(value: Any, dtype: torch.dtype) -> Any:
    """An integer as `dtype` holds it, 300 in int8 as 44; any other number itself."""
    if not isinstance(value, int) or isinstance(value, bool) or not is_integer(dtype):
        return value
    info = torch.iinfo(dtype)
    return (value - info.min) % 2**info.bits + info.min


def wide(x: torch.Tensor) -> torch.Tensor:
    """In the dtype that ATen computes in: float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def operands(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Two tensors, or a tensor and a number, in their common dtype; and that."""
    dtype = torch.result_type(x, y)
    like = x if isinstance(x, torch.Tensor) else y

    def one(v: Any) -> torch.Tensor:
        is_tensor = isinstance(v, torch.Tensor)
        return converted(v, dtype) if is_tensor else _number(wrapped(v, dtype), dtype, like)

    return one(x), one(y), dtype


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **how: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):  # `vmap` traces numbers as tensors, and leaves them numbers
        return torch.full((), as_held(x, dtype), dtype=dtype, device=xla.device())
    return aten._to_copy.default(converted(x, dtype) if dtype else x, dtype=dtype, **how)  # type: ignore[no-any-return]


def _full(size: Any, value: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return aten.full.default(size, as_held(value, dtype), dtype=dtype, **how)


def _new_full(x: torch.Tensor, size: Any, value: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return aten.new_full.default(x, size, as_held(value, dtype or x.dtype), dtype=dtype, **how)


def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return aten.scalar_tensor.default(as_held(value, dtype), dtype=dtype, **how)


def _with_dtype(op: Any) -> Callable[..., Any]:
    """A reduction whose operand is cast before."""

    def form(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **how: Any) -> Any:
        return op(converted(x, dtype) if dtype else x, *args, dtype=dtype, **how)

    return form


CAST_FORMS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.full.default: _full,
    aten.new_full.default: _new_full,
    aten.scalar_tensor.default: _scalar_tensor,
    torch.ops.prims.convert_element_type.default: converted,
    **{
        op: _with_dtype(op)
        for op in (aten.sum.default, aten.sum.dim_IntList, aten.prod.default, aten.prod.dim_int)
    },
}  # fmt: skip
