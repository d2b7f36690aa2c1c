"""Overlapping tensors of a model: whether they can hold the values of a file at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""A target tensor and the value to copy into it."""


def overwritten(copies: Sequence[Copy]) -> list[int]:
    """Positions of the targets whose values another copy would overwrite."""
    by_storage: dict[int, list[int]] = defaultdict(list)
    for position, (target, _) in enumerate(copies):
        if target.device.type != "xla" and target.numel():  # XLA storages do not show aliasing
            by_storage[target.untyped_storage()._cdata].append(position)
    return [i for sharing in by_storage.values() if len(sharing) > 1 for i in _disagreeing(copies, sharing)]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype are equal to the bit."""
    return torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))


def _disagreeing(copies: Sequence[Copy], sharing: Sequence[int]) -> list[int]:
    """Copy all values into a scratch storage: those that are not there afterwards were overwritten."""
    scratch = copies[sharing[0]][0].untyped_storage().clone()
    views = {position: _view(scratch, copies[position][0]) for position in sharing}
    with torch.no_grad():
        for position, view in views.items():
            view.copy_(copies[position][1])
    return [position for position, view in views.items() if not same_bytes(view, copies[position][1])]


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())
