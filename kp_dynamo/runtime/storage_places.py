"""Where tensors lie in a storage that they share, and the views of XLA that put them there: XLA has no strides."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StoragePlace:
    """The position of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The storage index after its last element."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def order(self) -> list[int] | None:
        """The order of its dimensions in memory, if its elements are one block; None if they are not."""
        order = sorted(range(len(self.shape)), key=lambda d: (-self.stride[d], -self.shape[d]))
        expected = 1
        for d in reversed(order):
            if self.shape[d] != 1 and self.stride[d] != expected:
                return None
            expected *= self.shape[d]
        return order if expected else None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has these strides, at any offset."""
        return tensor.stride() == self.stride


def overlap(places: Sequence[StoragePlace]) -> bool:
    """Whether a write to one tensor may show in another."""
    parts = sorted((place.offset, place.end) for place in places)
    return any(later[0] < earlier[1] for earlier, later in itertools.pairwise(parts))


@dataclass(frozen=True)
class Base:
    """A tensor that holds all of a storage.

    Attributes:
        number: Which of the tensors it is.
        order: The order of its dimensions in memory.
        shape: Its sizes in that order.
    """

    number: int
    order: list[int]
    shape: list[int]

    @classmethod
    def of(cls, places: Sequence[StoragePlace]) -> Base | None:
        """The base of these places. None if no place holds all, or if views of XLA cannot reach one of them."""
        end = max(place.end for place in places)
        for number, place in enumerate(places):
            if place.offset == 0 and place.end == end and (order := place.order) is not None:
                base = cls(number, order, [place.shape[d] for d in order])
                is_possible = all(p.order is not None or base._box(p) is not None for p in places)
                return base if is_possible else None
        return None

    def views_in_copy_of(self, tensors: Sequence[torch.Tensor], places: Sequence[StoragePlace]) -> list[torch.Tensor]:
        """Views of a copy of the base, at their places."""
        memory = tensors[self.number].detach().permute(self.order).reshape(-1).clone()
        return [self._block_in(memory, place) if place.order else self._box_in(memory, place) for place in places]

    def _block_in(self, memory: torch.Tensor, place: StoragePlace) -> torch.Tensor:
        """A part of the memory in another shape, permuted."""
        order = place.order or []
        part = memory.narrow(0, place.offset, place.end - place.offset).view([place.shape[d] for d in order])
        return part.permute([order.index(d) for d in range(len(order))])

    def _box_in(self, memory: torch.Tensor, place: StoragePlace) -> torch.Tensor:
        """A part of each dimension of the base, permuted."""
        box = self._box(place)
        assert box is not None, "the place is a box"
        view, starts = memory.view(self.shape), self._starts(place)
        for dim in reversed(range(len(self.shape))):
            view = view.narrow(dim, starts[dim], place.shape[box[dim]]) if dim in box else view.select(dim, starts[dim])
        kept = sorted(box)
        view = view.permute(sorted(range(len(kept)), key=lambda i: box[kept[i]]))
        for dim in (d for d in range(len(place.shape)) if place.shape[d] == 1):
            view = view.unsqueeze(dim)
        return view

    def _box(self, place: StoragePlace) -> dict[int, int] | None:
        """Dimension of the base -> dimension of the place with its stride, for those longer than 1."""
        strides, starts, box = self._strides, self._starts(place), {}
        for d, (size, step) in enumerate(zip(place.shape, place.stride, strict=True)):
            if size == 1:
                continue
            found = [i for i, s in enumerate(strides) if s == step and starts[i] + size <= self.shape[i]]
            if size == 0 or not found or found[-1] in box:
                return None
            box[found[-1]] = d
        return box

    @property
    def _strides(self) -> list[int]:
        return [*itertools.accumulate(reversed(self.shape[1:]), lambda a, b: a * b, initial=1)][::-1]

    def _starts(self, place: StoragePlace) -> list[int]:
        """Where the place begins in each dimension of the base."""
        starts, rest = [], place.offset
        for stride in self._strides:
            starts.append(rest // stride)
            rest %= stride
        return starts
