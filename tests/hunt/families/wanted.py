"""Which values a step takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

Wanted = Callable[[torch.Tensor], bool]


def floats(*ndims: int) -> Wanted:
    """float32 tensors, of one of these numbers of dimensions if any are given, and not empty."""
    return lambda v: v.dtype is torch.float32 and (not ndims or v.dim() in ndims) and v.numel() > 0


def whole(*ndims: int) -> Wanted:
    """int64 tensors."""
    return lambda v: v.dtype is torch.int64 and (not ndims or v.dim() in ndims)


def any_of(*ndims: int) -> Wanted:
    """Tensors of any dtype."""
    return lambda v: (not ndims or v.dim() in ndims) and v.numel() > 0


def masks(*ndims: int) -> Wanted:
    """Boolean tensors."""
    return lambda v: v.dtype is torch.bool and (not ndims or v.dim() in ndims)


def is_float(v: torch.Tensor) -> bool:
    """float32, of any shape."""
    return v.dtype is torch.float32 and v.numel() > 0
