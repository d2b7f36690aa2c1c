"""Overlapping tensors of a model: whether they can hold the values of a file at the same time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

Copy = tuple[torch.Tensor, torch.Tensor]
"""A target tensor and the value to copy into it."""


def overwritten(copies: Sequence[Copy]) -> list[int]:
    """Positions of the targets whose values another copy would overwrite."""
    return [position for sharing in _by_storage(copies) for position in _disagreeing(copies, sharing)]


def _by_storage(copies: Sequence[Copy]) -> list[list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for position, (target, _) in enumerate(copies):
        if target.device.type != "xla" and target.numel():  # XLA storages do not show aliasing
            found[target.untyped_storage()._cdata].append(position)
    return [sharing for sharing in found.values() if len(sharing) > 1]


def _disagreeing(copies: Sequence[Copy], sharing: Sequence[int]) -> list[int]:
    scratch = copies[sharing[0]][0].untyped_storage().clone()
    views = {position: _view(scratch, copies[position][0]) for position in sharing}
    with torch.no_grad():
        for position, view in views.items():
            view.copy_(copies[position][1])
    return [position for position, view in views.items() if not torch.equal(_bytes(view), _bytes(copies[position][1]))]


def _view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)
