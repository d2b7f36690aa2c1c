"""Sorting and order statistics: the tail is sorted last, whatever the true elements are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Atoms, Padded, has_tail, plain
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.layout import with_one_atom
from kp_dynamo.passes.padding.masks import Masks, floor_div
from kp_dynamo.passes.padding.rules import aten, rule


@rule(aten.sort.default, aten.sort.stable, layouts="...")
def _sort(call: Call) -> tuple[Padded, Padded]:
    d, descending = call.named_arg("dim", 1, -1), call.named_arg("descending", 2, False)
    x = with_one_atom(call.masks, call.args[0], d % len(call.args[0].dims))
    values, places = _in_order(call.masks, x, d, descending)
    return x.replaced(values), x.replaced(places)


def _in_order(masks: Masks, x: Padded, d: int, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorted values along `d` and their indices. Stable: of equal values, true elements come first."""
    result: tuple[torch.Tensor, torch.Tensor] = torch.sort(
        _with_tail_last(masks, x, [d], descending), dim=d, descending=descending, stable=True
    )
    return result


def _with_tail_last(masks: Masks, x: Padded, dims: Sequence[int], descending: bool) -> torch.Tensor:
    """ATen sorts every NaN as the largest number; XLA sorts a NaN with its sign bit set as the smallest."""
    if not x.tensor.dtype.is_floating_point:
        return masks.filled(x, dims, -math.inf if descending else math.inf)
    filled = masks.filled(x, dims, -math.inf if descending else math.nan)
    return torch.where(filled.isnan(), torch.full((), math.nan, dtype=filled.dtype), filled)


def _with_dim(x: Padded, d: int, atoms: tuple[Atoms, ...]) -> tuple[Atoms, ...]:
    return (*x.dims[:d], *atoms, *x.dims[d + 1 :])


@rule(aten.topk.default, layouts="...")
def _topk(call: Call) -> Any:
    x, count = call.args[:2]
    d, largest = call.named_arg("dim", 2, -1) % max(1, len(x.dims)), call.named_arg("largest", 3, True)
    if not has_tail(x.dims[d]):
        results = call.unchanged()
    else:
        x = with_one_atom(call.masks, x, d)
        results = (t.narrow(d, 0, count) for t in _in_order(call.masks, x, d, largest))
    return tuple(Padded(r, _with_dim(x, d, plain([count]))) for r in results)


@rule(aten.kthvalue.default, layouts="...")
def _kth_value(call: Call) -> Any:
    _, number = call.args[:2]
    return _picked(call, call.named_arg("dim", 2, -1), call.named_arg("keepdim", 3, False), number - 1)


@rule(aten.median.dim, aten.nanmedian.dim, layouts="...")
def _median(call: Call) -> Any:
    """The lower of the two middle values. `median` returns NaN, the first after the numbers; `nanmedian` skips it."""
    x, d, keeps = call.args[0], call.args[1] % max(1, len(call.args[0].dims)), call.named_arg("keepdim", 2, False)
    count: Any = call.masks.true_count(x, [d])
    if not x.tensor.dtype.is_floating_point:
        return _picked(call, d, keeps, floor_div(count - 1, 2))
    num_nans = call.masks.filled(x.replaced(x.tensor.isnan()), [d], 0).sum(d, keepdim=True)
    return _picked(call, d, keeps, _median_place(call.target, count, num_nans))


def _median_place(target: Any, count: Any, num_nans: torch.Tensor) -> torch.Tensor:
    """The index of the median in sorted order, with NaN last."""
    if target.overloadpacket is aten.nanmedian:
        return torch.as_tensor(floor_div(count - num_nans - 1, 2)).clamp(min=0)
    return torch.where(num_nans > 0, count - num_nans, floor_div(count - 1, 2))


def _picked(call: Call, d: int, keeps: bool, at: Any) -> tuple[Padded, ...]:
    """The elements at index `at` of the sorted order along `d`; `at` is one number, or one per row."""
    d %= len(call.args[0].dims)
    x = with_one_atom(call.masks, call.args[0], d)
    found = _in_order(call.masks, x, d, descending=False)
    rows = [1 if i == d else size for i, size in enumerate(x.shape)]
    index = torch.as_tensor(at).expand(rows)
    picked = (torch.gather(t, d, index) for t in found)
    dims = _with_dim(x, d, ((),) if keeps else ())
    return tuple(Padded(t if keeps else t.squeeze(d), dims) for t in picked)


@rule(aten.median.default, aten.nanmedian.default, layouts="...")
def _median_of_all(call: Call) -> Padded:
    x = call.args[0]
    count: Any = call.masks.true_count(x, range(len(x.dims)))
    flat = _with_tail_last(call.masks, x, range(len(x.dims)), descending=False).reshape(-1)
    values = torch.sort(flat, stable=True).values
    at = torch.as_tensor(floor_div(count - 1, 2))
    if x.tensor.dtype.is_floating_point:
        num_nans = call.masks.cleared(x.replaced(x.tensor.isnan())).sum()
        at = _median_place(call.target, count, num_nans)
    return Padded(torch.index_select(values, 0, at.reshape(1)).reshape(()), ())
