"""Random numbers where torch_xla 2.9 draws others than ATen.

Uniform numbers below 1 in narrow dtypes: torch_xla rounds float32 numbers, sometimes up to 1. ATen draws as many bits
as the dtype has significant digits. For a probability, torch_xla draws 7 bits in narrow dtypes, and 23 are drawn here.
Its exponential numbers end at 1e-5 and 11.5, those of ATen where the uniform ones do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import wide

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


def _bernoulli(x: torch.Tensor, p: Any = None, **kwargs: Any) -> Any:
    """1 with the probability `p`, which is `x` if it is not given."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    chance = x if p is None else p
    chance = chance.to(dtype) if isinstance(chance, torch.Tensor) else chance
    return (aten.rand_like.default(x, dtype=dtype) < chance).to(x.dtype)


def _exponential(x: torch.Tensor, rate: float = 1.0, **kwargs: Any) -> Any:
    """-log(1 - u) / rate, for uniform u from 0; never 0, as in ATen."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    found = -aten.log1p.default(-aten.rand_like.default(x, dtype=dtype))
    least = torch.full((), torch.finfo(dtype).eps / 2, dtype=dtype, device=x.device)
    return (torch.where(found == 0, least, found) / rate).to(x.dtype)


def _multinomial(x: torch.Tensor, count: int, replacement: bool = False, **kwargs: Any) -> Any:
    """The number of running sums of probabilities [..., V] that a uniform draw is above: [..., count].

    torch_xla adds up the probabilities in their dtype, of which bfloat16 has 128 values from 0.5 to 1. Its draws may be
    0, which is above no sum, although the first category may have a probability of 0. These are 1 at most, and above 0.
    """
    chances = wide(x)
    if not replacement and count > 1:
        return aten.multinomial.default(chances, count, replacement)
    sums = chances.cumsum(-1)
    sums = sums / sums.narrow(-1, -1, 1)
    draws = 1 - aten.rand.default([*x.shape[:-1], 1, count], dtype=sums.dtype, device=x.device)
    return (draws > sums.unsqueeze(-1)).sum(-2)


RANDOM_FORMS: dict[Any, Callable[..., Any]] = {
    aten.rand.default: _rand,
    aten.rand_like.default: _rand_like,
    aten.uniform.default: _uniform,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.bernoulli.Tensor: _bernoulli,
    aten.exponential.default: _exponential,
    aten.multinomial.default: _multinomial,
}
