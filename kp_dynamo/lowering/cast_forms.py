"""Casts with ATen's results on x86, where XLA's differ: floats out of an integer's range, booleans, complex numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.compat import xla

aten = torch.ops.aten


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`.

    1. A float becomes an integer of 32 or 64 bits, and a narrower integer keeps its low bits: -1.2 is 255 in uint8.
       XLA clamps to the narrow dtype, 0.
    2. A boolean becomes 1 or 0 by a `where`. XLA rewrites a product with a converted boolean as `where(b, x, 0)`, which
       drops an infinity or a NaN that a product with 0 keeps.
    3. A complex number is true if either part is nonzero; XLA only checks the real part.
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
    """A float as an integer. On x86, a value that is too large, infinite or NaN becomes the smallest integer."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    via = torch.int64 if _casts_via_int64(x.dtype, dtype) else torch.int32
    least = torch.iinfo(via).min
    # The `where` also keeps XLA from merging the two casts. Below the smallest integer, XLA's cast gives that integer.
    return torch.where(wide < -float(least), wide.to(via), _number(least, via, x)).to(dtype)


def as_held(value: Any, dtype: torch.dtype | None) -> Any:
    """A fill value for `torch.full`: torch_xla 2.9 truncates a number to an integer before it casts it to bool."""
    return bool(value) if dtype == torch.bool else value


def _number(value: float, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return torch.full((), as_held(value, dtype), dtype=dtype, device=like.device)


def _casts_via_int64(source: torch.dtype, dtype: torch.dtype) -> bool:
    """c10/util/TypeCast.h casts to uint8 via int64; a float32 outside int32's range has a low byte of 0 there."""
    return dtype in (torch.int64, torch.uint32, torch.uint64) or (dtype == torch.uint8 and source == torch.float64)


def is_integer(dtype: torch.dtype) -> bool:
    """Whether `dtype` is an integer dtype; bool is not."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def wrapped(value: Any, dtype: torch.dtype) -> Any:
    """An integer wrapped to the range of `dtype`, 300 in int8 to 44; any other number unchanged."""
    if not isinstance(value, int) or isinstance(value, bool) or not is_integer(dtype):
        return value
    info = torch.iinfo(dtype)
    return (value - info.min) % 2**info.bits + info.min


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` upcast to the dtype in which ATen computes: at least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def operands(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Two tensors, or a tensor and a number, in their common dtype; and that dtype."""
    dtype = torch.result_type(x, y)
    like = x if isinstance(x, torch.Tensor) else y

    def one(v: Any) -> torch.Tensor:
        is_tensor = isinstance(v, torch.Tensor)
        return converted(v, dtype) if is_tensor else _number(wrapped(v, dtype), dtype, like)

    return one(x), one(y), dtype


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **how: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):  # `vmap` traces numbers as tensors, but leaves them numbers in the graph
        return torch.full((), as_held(x, dtype), dtype=dtype, device=xla.device())
    return aten._to_copy.default(converted(x, dtype) if dtype else x, dtype=dtype, **how)  # type: ignore[no-any-return]


def _full(size: Any, value: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return aten.full.default(size, as_held(value, dtype), dtype=dtype, **how)


def _new_full(x: torch.Tensor, size: Any, value: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return aten.new_full.default(x, size, as_held(value, dtype or x.dtype), dtype=dtype, **how)


def _full_like(x: torch.Tensor, value: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return aten.full_like.default(x, as_held(value, dtype or x.dtype), dtype=dtype, **how)


def _scalar_tensor(value: Any, *, dtype: torch.dtype | None = None, **how: Any) -> Any:
    return aten.scalar_tensor.default(as_held(value, dtype), dtype=dtype, **how)


def _with_dtype(op: Any) -> Callable[..., Any]:
    """A reduction whose operand is cast first."""

    def form(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **how: Any) -> Any:
        return op(converted(x, dtype) if dtype else x, *args, dtype=dtype, **how)

    return form


def _sum(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """An empty `dim` means all of them: torch_xla then returns another shape if `keepdim` is true."""
    x = converted(x, dtype) if dtype else x
    return aten.sum.dim_IntList(x, list(dim or range(x.dim())), keepdim, dtype=dtype)


CAST_FORMS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.full.default: _full,
    aten.new_full.default: _new_full,
    aten.full_like.default: _full_like,
    aten.scalar_tensor.default: _scalar_tensor,
    torch.ops.prims.convert_element_type.default: converted,
    aten.sum.dim_IntList: _sum,
    **{op: _with_dtype(op) for op in (aten.sum.default, aten.prod.default, aten.prod.dim_int)},
}
