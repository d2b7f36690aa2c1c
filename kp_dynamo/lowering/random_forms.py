"""Uniform random numbers below 1 in narrow dtypes: torch_xla 2.9 rounds float32 numbers, sometimes up to 1.

ATen draws as many bits as the dtype has significant digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_DIGITS = {torch.bfloat16: 8, torch.float16: 11}


def _rand(size: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype not in _DIGITS:
        return aten.rand.default(size, dtype=dtype, **kwargs)
    return _truncate(aten.rand.default(size, dtype=torch.float32, **kwargs), dtype)


def _rand_like(x: torch.Tensor, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    dtype = dtype or x.dtype
    if dtype not in _DIGITS:
        return aten.rand_like.default(x, dtype=dtype, **kwargs)
    return _truncate(aten.rand_like.default(x, dtype=torch.float32, **kwargs), dtype)


def _uniform(x: torch.Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Any:
    if low == high:  # torch_xla aborts the process
        return torch.full_like(x, low)
    if x.dtype not in _DIGITS:
        return aten.uniform.default(x, low, high, **kwargs)
    return _truncate(aten.uniform.default(x.float(), 0.0, 1.0, **kwargs), x.dtype) * (high - low) + low


def _truncate(x: torch.Tensor, dtype: torch.dtype) -> Any:
    """Numbers in [0, 1), truncated to the digits of `dtype`."""
    steps = 2 ** _DIGITS[dtype]
    return ((x * steps).floor() * (1 / steps)).to(dtype)


RANDOM_FORMS: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand_like,
    aten.uniform.default: _uniform,
}
