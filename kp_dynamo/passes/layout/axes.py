"""Tracks which dimensions of one value correspond to which of another, through views and permutations. Edits no graph.

A dimension is a tuple of axes, outermost first; an axis is a number of elements at a constant stride. Viewing
[B, S, H * D] as [B, S, H, D] splits the axis H * D into two, for every value that contains it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Dim = tuple[int, ...]
Dims = tuple[Dim, ...]


@dataclass
class Axes:
    """The axes of some values, by number. Dimensions of size 1 have no axis."""

    sizes: list[int] = field(default_factory=list)
    _parts: dict[int, Dim] = field(default_factory=dict)

    def new(self, size: int) -> Dim:
        """A dimension of one axis, or of none if its size is 1."""
        if size == 1:
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def of(self, dim: Dim) -> Dim:
        """A dimension in the current axes: axes that have been split are replaced by their parts."""
        return tuple(part for axis in dim for part in (self.of(self._parts[axis]) if axis in self._parts else (axis,)))

    def flat(self, dims: Sequence[Dim]) -> Dim:
        return self.of(tuple(axis for dim in dims for axis in dim))

    def viewed(self, dims: Sequence[Dim], shape: Sequence[int]) -> Dims | None:
        """The dimensions of a view of `shape`; None if a size does not split an axis into whole parts."""
        axes = self.flat(dims)
        cuts = _cuts([self.sizes[axis] for axis in axes], shape)
        if cuts is None:
            return None
        for axis, parts in zip(axes, cuts, strict=True):
            if len(parts) > 1:
                self._parts[axis] = tuple(self.new(size)[0] for size in parts)
        return _grouped(self.flat(dims), self.sizes, shape)

    def size_of(self, dim: Dim) -> int:
        return math.prod(self.sizes[axis] for axis in self.of(dim))


def _cuts(sizes: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """For each axis, outermost first, the sizes of the parts that the sizes of `shape` split it into."""
    cuts: list[list[int]] = [[] for _ in sizes]
    number, left = 0, sizes[0] if sizes else 1
    for size in shape:
        needed = size
        while needed > 1:
            part = min(left, needed)
            if part <= 1 or left % part or needed % part:
                return None
            cuts[number].append(part)
            needed, left = needed // part, left // part
            if left == 1 and number + 1 < len(sizes):
                number += 1
                left = sizes[number]
    return cuts


def _grouped(axes: Dim, sizes: Sequence[int], shape: Sequence[int]) -> Dims:
    """Axes, in order, grouped into dimensions of these sizes."""
    dims, rest = [], list(axes)
    for size in shape:
        dim: list[int] = []
        while math.prod(sizes[axis] for axis in dim) < size:
            dim.append(rest.pop(0))
        dims.append(tuple(dim))
    return tuple(dims)


def merged(terms: Sequence[Dim], apart: Dim) -> list[Dims]:
    """Groups the axes of each term: axes adjacent in every term are merged, except those of `apart`."""

    def belong_together(one: int, other: int) -> bool:
        alike = all((one in term) == (other in term) for term in terms)
        return alike and all(term.index(other) == term.index(one) + 1 for term in terms if one in term)

    found = []
    for term in terms:
        groups: list[Dim] = []
        for axis in term:
            last = groups[-1][-1] if groups else None
            if last is not None and not {last, axis} & {*apart} and belong_together(last, axis):
                groups[-1] = (*groups[-1], axis)
            else:
                groups.append((axis,))
        found.append(tuple(groups))
    return found
