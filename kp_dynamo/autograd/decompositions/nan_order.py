"""The index of the largest or smallest element if there is a NaN: ATen returns the first NaN, torch_xla 2.9 does not.

Reductions and elementwise maxima do propagate a NaN; for XLA:CPU see `compat/fast_extremes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten


def order_decompositions() -> dict[Any, Callable[..., Any]]:
    """For floating-point tensors: compute the extreme value, then the first index that holds it or a NaN."""
    return {
        aten.argmax.default: partial(_place, torch.amax),
        aten.argmin.default: partial(_place, torch.amin),
        aten.max.dim: partial(_value_and_place, torch.amax),
        aten.min.dim: partial(_value_and_place, torch.amin),
    }


def _place(extreme: Callable[..., Any], x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    if not x.dtype.is_floating_point or x.dim() == 0 or x.numel() == 0:
        return NotImplemented
    if dim is not None:
        return _first(x, extreme(x, dim, keepdim=True), dim, keepdim)
    flat = x.reshape(-1)
    place = _first(flat, extreme(flat, 0, keepdim=True), 0, False)
    return place.reshape([1] * x.dim()) if keepdim else place


def _value_and_place(extreme: Callable[..., Any], x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
    if not x.dtype.is_floating_point or x.dim() == 0 or x.numel() == 0:
        return NotImplemented
    value = extreme(x, dim, keepdim=True)
    return value if keepdim else value.squeeze(dim), _first(x, value, dim, keepdim)


def _first(x: torch.Tensor, value: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    return ((x == value) | x.isnan()).to(torch.int8).argmax(dim, keepdim=keepdim)
