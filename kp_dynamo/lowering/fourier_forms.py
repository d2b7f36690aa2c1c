"""Discrete Fourier transforms, as XLA's Fft of one dimension after the other: torch_xla 2.9 has no lowering for them.

`stft`, `istft`, and the gradients of all transforms reach the lowering as these three operators.

A TPU's compiler turns an Fft into matmuls, for any length: `stft` and `irfft` of 8 x 16000 samples (length 400, hop
160) with an `fft` of 1009 samples each take a v5e 0.21 modelled ms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.compat import chips
from kp_dynamo.lowering.complex_parts import join, split
from kp_dynamo.lowering.hlo_ops import fft
from kp_dynamo.lowering.spmd import is_spmd

aten = torch.ops.aten

_NONE, _BY_ROOT, _BY_LENGTH = range(3)  # ATen's `fft_norm_mode`


def _complex_to_complex(x: torch.Tensor, dims: Sequence[int], norm: int, forward: bool) -> torch.Tensor:
    factor = _factor(norm, _length(x, dims), is_inverse=not forward)
    return _scaled(_transformed(x, dims, forward), factor)


def _real_to_complex(x: torch.Tensor, dims: Sequence[int], norm: int, onesided: bool) -> torch.Tensor:
    *others, last = dims
    length = x.shape[last]
    half = _along(x, last, "RFFT", length)
    found = _transformed(half if onesided else _mirrored(half, last, length), others, True)
    return _scaled(found, _factor(norm, _length(x, dims), is_inverse=False))


def _mirrored(half: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """All frequencies of real samples from half of them: the others are their conjugates, as in eager."""
    if length < 3:
        return half
    real, imaginary = split(half)
    real_rest, imaginary_rest = (part.narrow(dim, 1, (length - 1) // 2).flip(dim) for part in (real, imaginary))
    return join(torch.cat([real, real_rest], dim), torch.cat([imaginary, -imaginary_rest], dim))


def _complex_to_real(x: torch.Tensor, dims: Sequence[int], norm: int, length: int) -> torch.Tensor:
    *others, last = dims
    if x.shape[last] != length // 2 + 1:
        raise NotImplementedError("XLA's inverse transform reads exactly half of the frequencies")
    factor = _factor(norm, _length(x, others) * length, is_inverse=True)
    return _scaled(_along(_transformed(x, others, False), last, "IRFFT", length), factor)


def _transformed(x: torch.Tensor, dims: Sequence[int], forward: bool) -> torch.Tensor:
    for dim in dims:
        x = _along(x, dim, "FFT" if forward else "IFFT", x.shape[dim])
    return x if dims else x.clone()


def _along(x: torch.Tensor, dim: int, kind: str, length: int) -> torch.Tensor:
    """One transform of a dimension that is made the last, as XLA wants it."""
    if is_spmd() and chips.device_kind() == "CPU":
        raise NotImplementedError("partitioned, XLA:CPU may choose a layout for an Fft that it cannot run")
    moved = x.movedim(dim, -1)
    if not x.numel():
        return _of_nothing(moved, kind, length).movedim(-1, dim)
    return fft(moved, kind, length).movedim(-1, dim)


def _of_nothing(x: torch.Tensor, kind: str, length: int) -> torch.Tensor:
    dtype = x.dtype.to_real() if kind == "IRFFT" else x.dtype.to_complex()
    last = length // 2 + 1 if kind == "RFFT" else length
    return torch.zeros((*x.shape[:-1], last), dtype=dtype, device=x.device)


def _length(x: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


def _factor(norm: int, length: int, is_inverse: bool) -> float:
    """What scales XLA's result: it has divided by the length already if the transform is an inverse one."""
    power = {_NONE: 0.0, _BY_ROOT: -0.5, _BY_LENGTH: -1.0}[norm] + is_inverse
    return float(length) ** power if length else 1.0


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Scale last, as eager does: sums that cancel are then 0.

    Each part by itself: XLA's complex product makes the other part of an infinity NaN.
    """
    if factor == 1:
        return x
    if not x.is_complex():
        return x * factor
    real, imaginary = split(x)
    return join(real * factor, imaginary * factor)


FOURIER_FORMS: dict[Any, Callable[..., torch.Tensor]] = {
    aten._fft_c2c.default: _complex_to_complex,
    aten._fft_r2c.default: _real_to_complex,
    aten._fft_c2r.default: _complex_to_real,
}
