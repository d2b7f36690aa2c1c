"""Matrix factorizations of scaled inputs, because XLA iterates until the residual is small relative to 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _svd(a: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, **kwargs: Any) -> Any:
    if a.numel() == 0:
        return _svd_of_nothing(a, full_matrices)
    _require_narrow(a)
    scale = _scale(a)
    u, s, v = aten._linalg_svd.default(a / scale, full_matrices, compute_uv, **kwargs)
    # torch_xla 2.9 swaps the first two dimensions of V instead of its last two. It reports one matrix's shape for the
    # values but computes all; the product with the scale has the full shape.
    return u, s * scale.squeeze(-1), v.transpose(0, 1).transpose(-2, -1) if compute_uv else v


def _svd_of_nothing(a: torch.Tensor, full_matrices: bool) -> Any:
    """torch_xla 2.9 slices one element from the vectors of an empty matrix, so compiling fails."""
    *batch, rows, columns = a.shape
    rank = min(rows, columns)
    values = torch.zeros((*batch, rank), dtype=a.real.dtype if a.is_complex() else a.dtype, device=a.device)
    left, right = (
        torch.eye(size, dtype=a.dtype, device=a.device).expand(*batch, size, size) for size in (rows, columns)
    )
    return (left, values, right) if full_matrices else (left[..., :rank], values, right[..., :rank, :])


def _eigh(a: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    _require_narrow(a)
    scale = _scale(a)
    values, vectors = aten._linalg_eigh.default(a / scale, *args, **kwargs)
    return values * scale.squeeze(-1), vectors


def _pinv(
    a: torch.Tensor, *, atol: torch.Tensor | None = None, rtol: torch.Tensor | None = None, hermitian: bool = False
) -> Any:
    """As in ATen: torch_xla iterates as for an SVD, and fails for a batch or an empty matrix."""
    if a.numel() == 0:
        return torch.zeros_like(a.mT)
    if hermitian:
        values, left = _eigh(a)
        right, sizes = _adjoint(left), values.abs()
    else:
        left, values, right = _svd(a)
        sizes = values
    least = _tolerance(a, sizes.amax(-1), atol, rtol).unsqueeze(-1)
    inverse = torch.where(sizes > least, values.reciprocal(), 0.0)
    return torch.matmul(_adjoint(right) * inverse.unsqueeze(-2).to(a.dtype), _adjoint(left))


def _adjoint(a: torch.Tensor) -> torch.Tensor:
    moved = a.transpose(-2, -1)
    return moved.conj_physical() if a.is_complex() else moved


def _tolerance(
    a: torch.Tensor, largest: torch.Tensor, atol: torch.Tensor | None, rtol: torch.Tensor | None
) -> torch.Tensor:
    """The threshold below which a singular value of `a` counts as 0, with ATen's defaults."""
    default = torch.finfo(a.dtype).eps * max(a.shape[-2:])
    if rtol is not None:
        relative = rtol * largest
    else:
        relative = default * largest if atol is None else torch.where(atol > 0, 0.0, default) * largest
    return relative if atol is None else torch.maximum(atol.to(largest.dtype), relative.to(largest.dtype))


def _require_narrow(a: torch.Tensor) -> None:
    """Raise for float64, which then runs on the CPU: XLA's iterations stop at 1e-6."""
    if a.dtype in (torch.float64, torch.complex128):
        raise NotImplementedError("XLA's factorizations of float64 are only as exact as float32")


def _scale(a: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each matrix [..., 1, 1]; 1 if it is 0, infinite or NaN."""
    if a.numel() == 0 or a.is_complex():
        return torch.ones([1] * a.dim(), dtype=a.real.dtype if a.is_complex() else a.dtype, device=a.device)
    largest = a.abs().amax((-2, -1), keepdim=True)
    return torch.where((largest > 0) & ~largest.isinf(), largest, 1.0)


LINALG_FORMS: dict[Any, Callable[..., Any]] = {
    aten._linalg_svd.default: _svd,
    aten._linalg_eigh.default: _eigh,
    aten.linalg_pinv.atol_rtol_tensor: _pinv,
}
