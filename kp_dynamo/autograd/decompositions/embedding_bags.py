"""`embedding_bag` and its gradients as gathers and sums over bags: torch_xla 2.9 has no lowering for them.

Legend: N indices, V rows of the table, D its columns, B bags.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.ops.compute_dtype import compute_dtype

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)


def embedding_bag_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions of the forward, of the gradient of the table, and of that of the weights."""
    return {
        aten._embedding_bag.default: _embedding_bag,
        aten._embedding_bag_forward_only.default: _embedding_bag,
        aten._embedding_bag_backward.default: _table_gradient,
        aten._embedding_bag_per_sample_weights_backward.default: _weights_gradient,
    }


def _embedding_bag(
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """[V, D], [N], [B] -> [B, D], and what ATen keeps for its backward: bag of each index, sizes, maxima."""
    num_bags = offsets.shape[0] - int(include_last_offset)
    bags = _bag_of_each(indices, offsets[:num_bags])
    is_counted = indices != padding_idx
    rows = table.index_select(0, indices)
    if mode == _SUM:
        result = _sums(_weighted(rows, per_sample_weights), bags, is_counted, num_bags)
        nothing = torch.zeros_like(offsets[:num_bags])
        is_kept = table.dtype == torch.float64 or padding_idx >= 0
        return result.to(table.dtype), bags if is_kept else bags[:0], nothing, nothing.clone()
    sizes = _sums(torch.ones_like(indices), bags, is_counted, num_bags).to(offsets.dtype)
    if mode == _MEAN:
        result = _sums(_weighted(rows, None), bags, is_counted, num_bags) / sizes.clamp(min=1).unsqueeze(1)
        return result.to(table.dtype), bags, sizes, sizes.clone()
    result, maxima = _maxima(rows, indices, bags, is_counted, num_bags)
    return result, bags, sizes, maxima.to(offsets.dtype)


def _bag_of_each(indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The bag of each index [N]: how many bags begin at or before it, less one."""
    begins = torch.zeros(indices.shape[0] + 1, dtype=offsets.dtype, device=indices.device)
    begins = begins.index_add(0, offsets, torch.ones_like(offsets))
    return (begins[:-1].cumsum(0) - 1).to(offsets.dtype)


def _weighted(rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    wide = rows.to(compute_dtype(rows.dtype))
    return wide if weights is None else wide * weights.to(wide.dtype).unsqueeze(1)


def _sums(values: torch.Tensor, bags: torch.Tensor, is_counted: torch.Tensor, num_bags: Any) -> torch.Tensor:
    """[N, ...] -> [B, ...]."""
    counted = torch.where(_beside(is_counted, values), values, 0)
    return values.new_zeros((num_bags, *values.shape[1:])).index_add(0, bags, counted)


def _beside(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, *[1] * (values.dim() - 1))


def _maxima(
    rows: torch.Tensor, indices: torch.Tensor, bags: torch.Tensor, is_counted: torch.Tensor, num_bags: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each bag and column [B, D], 0 for an empty bag, and the index that has it first.

    ATen compares with `>`, one index after the other: a NaN that comes first stays, and any other is passed over.
    """
    num = rows.shape[0]
    if num == 0:
        return rows.new_zeros(num_bags, rows.shape[1]), bags.new_zeros(num_bags, rows.shape[1])
    places = torch.arange(num, device=rows.device).unsqueeze(1)
    is_counted = is_counted.unsqueeze(1)
    first = _extreme("amin", torch.where(is_counted, places, num), bags, num_bags, num)
    nans = torch.where(places == first.index_select(0, bags), math.inf, -math.inf).to(rows.dtype)
    ordered = torch.where(rows.isnan(), nans, rows)
    largest = _extreme("amax", torch.where(is_counted, ordered, -math.inf), bags, num_bags, -math.inf)
    is_largest = is_counted & (ordered == largest.index_select(0, bags))
    chosen = _extreme("amin", torch.where(is_largest, places, num), bags, num_bags, num)
    is_empty, chosen = chosen == num, chosen.clamp(max=num - 1)
    maxima = torch.where(is_empty, 0, indices.unsqueeze(1).expand_as(rows).gather(0, chosen))
    return torch.where(is_empty, 0, rows.gather(0, chosen)), maxima


def _extreme(reduce: str, values: torch.Tensor, bags: torch.Tensor, num_bags: Any, start: float) -> torch.Tensor:
    """[N, D] -> [B, D]."""
    index = bags.long().unsqueeze(1).expand_as(values)
    return values.new_full((num_bags, values.shape[1]), start).scatter_reduce(0, index, values, reduce)


def _table_gradient(
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: Any,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """[B, D] -> [V, D]. A sparse gradient is left to torch."""
    if sparse:
        return NotImplemented
    wide = gradient.to(compute_dtype(gradient.dtype))
    table = wide.new_zeros(num_weights, gradient.shape[1])
    if mode == _MAX:
        chosen = torch.where(bag_size.unsqueeze(1) > 0, wide, 0)
        return table.scatter_add(0, maximum_indices.long(), chosen).to(gradient.dtype)
    bags = _bag_of_each(indices, offsets[: gradient.shape[0]])
    if mode == _MEAN:
        wide = wide / bag_size.clamp(min=1).unsqueeze(1)
    rows = _weighted(wide.index_select(0, bags), per_sample_weights)
    if scale_grad_by_freq:  # ATen of torch 2.9 takes the counts of other indices on the CPU
        times = indices.new_zeros(num_weights).index_add(0, indices, torch.ones_like(indices))
        rows = rows / times.index_select(0, indices).unsqueeze(1)
    rows = torch.where((indices != padding_idx).unsqueeze(1), rows, 0)
    return table.index_add(0, indices, rows).to(gradient.dtype)


def _weights_gradient(
    gradient: torch.Tensor,
    table: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    """[B, D] -> [N]."""
    bags = _bag_of_each(indices, offsets[: gradient.shape[0]])
    dots = (gradient.index_select(0, bags) * table.index_select(0, indices)).sum(1)
    return torch.where(indices != padding_idx, dots, 0).to(gradient.dtype)
