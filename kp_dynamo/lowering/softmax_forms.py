"""Softmax, log_softmax and logsumexp for a maximum that is infinite or a large product.

XLA:CPU recomputes a product in each consumer. There it fuses the product with the subtraction of the maximum and rounds
once, but the maximum was rounded before: for equal numbers around 1e12 the difference is 30000, not 0. A TPU's compiler
does not do this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import wide
from kp_dynamo.lowering.hlo_ops import reduce_max
from kp_dynamo.ops.optimization_barrier import keeps_barriers

aten = torch.ops.aten


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    if _is_plain(x):
        return aten._softmax.default(x, dim, half_to_float)
    powers = _from_largest(wide(x), [dim % x.dim()])[0].exp()
    return (powers / powers.sum(dim, keepdim=True)).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
    if _is_plain(x):
        return aten._log_softmax.default(x, dim, half_to_float)
    below = _from_largest(wide(x), [dim % x.dim()])[0]
    return (below - below.exp().sum(dim, keepdim=True).log()).to(torch.float32 if half_to_float else x.dtype)


def _logsumexp(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> Any:
    """torch_xla also subtracts an infinite maximum: inf - inf."""
    if x.dim() == 0:
        return x.clone()
    if x.numel() == 0:
        return aten.logsumexp(wide(x), dim, keepdim).to(x.dtype)
    dims = sorted(d % x.dim() for d in dim) if dim else list(range(x.dim()))
    full = wide(x)
    below, largest = _from_largest(full, dims)
    # An infinite maximum is the result, unless there is a NaN, which a maximum across devices may have lost.
    alone = torch.where(full == largest, 0.0, torch.where(full.isnan(), full, -torch.inf))
    below = torch.where(largest.isinf(), alone, below)
    result = below.exp().sum(dims, keepdim=True).log() + largest
    return (result if keepdim else result.squeeze(dims)).to(x.dtype)


def _is_plain(x: torch.Tensor) -> bool:
    return keeps_barriers() or x.dim() == 0 or x.numel() == 0 or not x.dtype.is_floating_point


def _from_largest(x: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` minus its maximum, 0 where they are equal and finite, and the maximum [..., 1, ...]."""
    largest = reduce_max(x, dims).reshape([1 if d in dims else size for d, size in enumerate(x.shape)])
    is_largest = (x == largest) & ~largest.isinf()
    return torch.where(is_largest, torch.zeros((), dtype=x.dtype, device=x.device), x - largest), largest


SOFTMAX_FORMS: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _log_softmax,
    aten.logsumexp.default: _logsumexp,
}
