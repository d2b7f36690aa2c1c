"""Results of Fourier transforms: their strides in eager, and their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.autograd.memory_formats import empty_in_format, empty_in_order

aten = torch.ops.aten

TRANSFORMS = (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)


def transformed(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """MKL transforms: the other dimensions outermost, by stride, then the transformed ones (SpectralOps.cpp)."""
    x, dims = args[0], list(args[1])
    if not torch.backends.mkl.is_available():
        return empty_in_format(result, torch.contiguous_format)
    if not x.is_complex():  # the last is transformed first, and halved
        return empty_in_order(result, _batch_order(x, dims) + _by_strides(x, dims[:-1]) + dims[-1:])
    if result.is_complex():
        return empty_in_order(result, _batch_order(x, dims) + _by_strides(x, dims))
    if len(dims) > 1:  # a complex transform of all dimensions but the last, then one of the last
        x = transformed((x, dims[:-1]), x)
    return empty_in_order(result, _batch_order(x, dims[-1:]) + dims[-1:])


def _batch_order(x: torch.Tensor, dims: Sequence[int]) -> list[int]:
    return _by_strides(x, [d for d in range(x.dim()) if d not in dims])


def _by_strides(x: torch.Tensor, dims: Sequence[int]) -> list[int]:
    return sorted(dims, key=x.stride, reverse=True)


def spectrum(func: Any, args: Sequence[Any]) -> Any:
    """A tensor of the shape and dtype of an FFT result: torch's fake kernels fail for some symbolic sizes."""
    x, dims = args[0], args[1]
    if func is aten._fft_c2c.default:
        return torch.empty_like(x)
    shape = list(x.shape)
    if func is aten._fft_c2r.default:
        shape[dims[-1]] = args[3]
        return x.new_empty(shape, dtype=x.dtype.to_real())
    if args[3]:  # one-sided
        shape[dims[-1]] = shape[dims[-1]] // 2 + 1
    return x.new_empty(shape, dtype=x.dtype.to_complex())
