"""Cumulative operators that torch_xla 2.9 gets wrong for zeros, NaN or empty inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import converted

aten = torch.ops.aten


def _cumulative(combine: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`cummax` or `cummin`: torch_xla's does not propagate a NaN, and XLA:CPU cannot compile it at sizes 31 and 33.

    Each step of the scan doubles the range that a value is the extreme of. An index is the last position so far whose
    element equals the extreme, or is a NaN.
    """

    def form(x: torch.Tensor, dim: int) -> Any:
        if x.dim() == 0 or x.numel() == 0:
            return x.clone(), torch.zeros(x.shape, dtype=torch.int64, device=x.device)
        values = _scan(x, dim, combine)
        is_extreme = x == values
        if x.dtype.is_floating_point:
            is_extreme = is_extreme | x.isnan()
        shape = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
        places = torch.arange(x.shape[dim], device=x.device).reshape(shape)
        return values, _scan(torch.where(is_extreme, places, 0), dim, torch.maximum)

    return form


def _scan(x: torch.Tensor, dim: int, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
    size, reach = x.shape[dim], 1
    while reach < size:
        later = combine(x.narrow(dim, reach, size - reach), x.narrow(dim, 0, size - reach))
        x = torch.cat([x.narrow(dim, 0, reach), later], dim)
        reach *= 2
    return x


def _accumulated(op: Any) -> Callable[..., Any]:
    """torch_xla gives XLA an empty window, which XLA rejects."""

    def form(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        return op(x, dim, dtype=dtype) if x.numel() else torch.zeros_like(x, dtype=dtype)

    return form


def _cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """XLA multiplies blocks of elements, which may overflow where a zero came before: 0 * inf is NaN.

    After a zero, eager's product stays zero unless an element is not finite. Eager multiplies float32 in float64,
    where the product before the zero overflows later than here.
    """
    accumulated = _accumulated(aten.cumprod.default)
    x = x if dtype is None else converted(x, dtype)
    if not x.is_floating_point() or not x.dim() or not x.numel():
        return accumulated(x, dim)
    is_zero = x == 0
    after_zero = is_zero.to(torch.int32).cumsum(dim) > 0
    products = accumulated(torch.where(is_zero, 1, x), dim)
    is_lost = ~x.isfinite()
    if x.dtype == torch.float64:
        is_lost = is_lost | (~products.isfinite() & ~after_zero)
    # torch_xla lacks signbit; the sign of a zero is that of its inverse.
    signs = accumulated(torch.where(torch.where(is_zero, 1 / x, x) < 0, -1.0, 1.0).to(x.dtype), dim)
    zeros = torch.where(is_lost.to(torch.int32).cumsum(dim) > 0, math.nan, 0.0 * signs)
    return torch.where(after_zero, zeros, products)


SCAN_FORMS: dict[Any, Callable[..., Any]] = {
    aten.cumsum.default: _accumulated(aten.cumsum.default),
    aten.cumprod.default: _cumprod,
    aten.cummax.default: _cumulative(torch.maximum),
    aten.cummin.default: _cumulative(torch.minimum),
}
