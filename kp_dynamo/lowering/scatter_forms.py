"""Scatters that torch_xla 2.9 fails to lower: a number with a long index, and a source longer than the mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import wide
from kp_dynamo.lowering.elementwise_forms import number

aten = torch.ops.aten


def _scatter_number(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """torch_xla broadcasts the number to the shape of `x`, but `index` may have more elements."""
    return aten.scatter.src(x, dim, index, number(value, x).expand(index.shape))


def _scatter_reduced_number(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any, *, reduce: str) -> Any:
    """Added in float32, as in ATen."""
    if reduce != "add":
        return aten.scatter.value_reduce(x, dim, index, value, reduce=reduce)
    values = wide(number(value, x)).expand(index.shape)
    return aten.scatter_add.default(wide(x), dim, index, values).to(x.dtype)


def _masked_scatter(x: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """The n-th True of the mask takes the n-th element of the source, which may be longer."""
    x, mask = torch.broadcast_tensors(x, mask)
    if x.numel() == 0 or source.numel() == 0:
        return x.clone()
    places = mask.reshape(-1).long().cumsum(0) - 1
    chosen = source.reshape(-1).index_select(0, places.clamp(0, source.numel() - 1))
    return torch.where(mask, chosen.reshape(x.shape), x)


SCATTER_FORMS: dict[Any, Callable[..., Any]] = {
    aten.scatter.value: _scatter_number,
    aten.scatter.value_reduce: _scatter_reduced_number,
    aten.masked_scatter.default: _masked_scatter,
}
