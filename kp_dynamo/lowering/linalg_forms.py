"""Factorisations of matrices of any magnitude: XLA's iterate until what is left is small beside 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _svd(a: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    scale = _scale(a)
    u, s, v = aten._linalg_svd.default(a / scale, *args, **kwargs)
    return u, s * scale.squeeze(-1), v


def _eigh(a: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    scale = _scale(a)
    values, vectors = aten._linalg_eigh.default(a / scale, *args, **kwargs)
    return values * scale.squeeze(-1), vectors


def _scale(a: torch.Tensor) -> torch.Tensor:
    """The largest element of each matrix [..., 1, 1]; 1 where it is 0, infinite or NaN."""
    if a.numel() == 0 or a.is_complex():
        return torch.ones([1] * a.dim(), dtype=a.real.dtype if a.is_complex() else a.dtype, device=a.device)
    largest = a.abs().amax((-2, -1), keepdim=True)
    return torch.where((largest > 0) & ~largest.isinf(), largest, 1.0)


LINALG_FORMS: dict[Any, Callable[..., Any]] = {
    aten._linalg_svd.default: _svd,
    aten._linalg_eigh.default: _eigh,
}
