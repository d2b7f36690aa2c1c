"""Masks that become factors: XLA takes a product with a cast boolean for a selection, which drops a NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _to_copy(x: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if x.dtype == torch.bool and dtype is not None and dtype.is_floating_point:
        return _as_factor(x, dtype)
    return aten._to_copy.default(x, dtype=dtype, **kwargs)


def _mul(x: torch.Tensor, y: torch.Tensor) -> Any:
    dtype = torch.result_type(x, y)
    if not dtype.is_floating_point:
        return aten.mul.Tensor(x, y)
    x, y = (_as_factor(t, dtype) if t.dtype == torch.bool else t for t in (x, y))
    return aten.mul.Tensor(x, y)


def _as_factor(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 and 1, selected: times inf a 0 is NaN, as eager has it for `loss * mask.float()`."""
    one, zero = (torch.full((), value, dtype=dtype, device=mask.device) for value in (1.0, 0.0))
    return torch.where(mask, one, zero)


MASK_FORMS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _to_copy,
    aten.mul.Tensor: _mul,
}
