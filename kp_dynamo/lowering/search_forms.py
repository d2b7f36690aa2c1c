"""`searchsorted` and `bucketize` as ATen's binary search, unrolled: torch_xla 2.9 has no lowering for them.

The search reads the same elements as ATen's. So its result is ATen's also for numbers that are not sorted, and for NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import converted
from kp_dynamo.lowering.elementwise_forms import number
from kp_dynamo.lowering.hlo_ops import halved

aten = torch.ops.aten


def _search_sorted(
    numbers: torch.Tensor,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: torch.Tensor | None = None,
) -> torch.Tensor:
    """For each value, the first index in the last dimension of `numbers` before which it can be inserted.

    What ATen refuses raises NotImplementedError: the operator then runs on the CPU, with ATen's error.
    """
    dtype = torch.result_type(numbers, values)
    numbers = converted(numbers, dtype)
    values = converted(values, dtype) if isinstance(values, torch.Tensor) else number(values, numbers)
    is_refused = dtype == torch.bool or dtype.is_complex or (side == "left" and right) or not numbers.dim()
    if is_refused or (numbers.dim() > 1 and numbers.shape[:-1] != values.shape[:-1]):
        raise NotImplementedError("ATen refuses these arguments")
    if sorter is not None:
        numbers = numbers.gather(-1, sorter)
    found = _searched(numbers, values, right or side == "right")
    return found.to(torch.int32 if out_int32 else torch.int64)


def _searched(numbers: torch.Tensor, values: torch.Tensor, right: bool) -> torch.Tensor:
    """One halving of all intervals [start, end) after the other."""
    length = numbers.shape[-1]
    start = torch.zeros_like(values, dtype=torch.int64)
    end = start + length
    for _ in range(length.bit_length() if values.numel() else 0):
        middle = start + halved(end - start)
        found = _taken(numbers, middle.clamp(0, length - 1))
        is_before = ~(found > values if right else found >= values) & (start < end)
        # Where an interval is empty, its middle is its end.
        start, end = torch.where(is_before, middle + 1, start), torch.where(is_before, end, middle)
    return start


def _taken(numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if numbers.dim() > 1:
        return numbers.gather(-1, places)
    return numbers.index_select(0, places.reshape(-1)).reshape(places.shape)


def _bucketize(
    values: torch.Tensor, boundaries: torch.Tensor, *, out_int32: bool = False, right: bool = False
) -> torch.Tensor:
    if boundaries.dim() != 1:
        raise NotImplementedError("ATen refuses these arguments")
    return _search_sorted(boundaries, values, out_int32=out_int32, right=right)


SEARCH_FORMS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.searchsorted.Tensor: _search_sorted,
    aten.searchsorted.Scalar: _search_sorted,
    aten.bucketize.Tensor: _bucketize,
}
