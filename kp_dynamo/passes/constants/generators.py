"""Ops that generate a constant: `full` for equal elements, `arange` for an arithmetic sequence."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def is_uniform(value: torch.Tensor) -> bool:
    """Whether all elements have the same bits."""
    rows = value.reshape(-1, 1).contiguous().view(torch.uint8)
    return value.numel() > 0 and torch.equal(rows, rows[:1].expand_as(rows))


def generator_of(value: torch.Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """The op and arguments that generate this constant, or None."""
    if is_uniform(value):
        return aten.full.default, (list(value.shape), value.reshape(-1)[0].item())
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64) or value.numel() < 2:
        return None
    start, step = int(value[0]), int(value[1]) - int(value[0])
    end = start + step * value.numel()
    info = torch.iinfo(value.dtype)
    is_counting = step != 0 and info.min <= end <= info.max
    if is_counting and torch.equal(torch.arange(start, end, step, dtype=value.dtype), value):
        return aten.arange.start_step, (start, end, step)
    return None
