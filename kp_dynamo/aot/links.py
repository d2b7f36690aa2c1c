"""The time of a collective on the links between the chips of a slice.

V is the size of the whole array that the n chips of a group share, and W what a chip sends a second along one axis of
the grid: both directions together on a ring, one direction on a line (an axis without wrap-around link). A group may
span several axes of the grid; each of them carries a part. If its places along an axis are s chips apart, s groups
share the links there, so each has a part of W.

    all-gather, reduce-scatter   V (n - 1) / n / sum of W
    all-reduce                   twice that: a reduce-scatter and an all-gather
    all-to-all                   half of each half's data crosses the middle of the longest axis
    collective-permute           the most loaded link, with each message on the shortest way, one axis after the other

Each takes at least a microsecond a hop. Source: jax-ml.github.io/scaling-book/sharding, where n is large.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kp_dynamo.aot.topologies import Topology
from kp_dynamo.hardware import CHIPS

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]

HOP_S = 1e-6
"""Seconds of one hop of a short message (scaling book)."""

_V4_LINK_BYTES_PER_S = 4.5e10  # the scaling book; Google Cloud publishes none


@dataclass(frozen=True)
class _Span:
    """How a group extends along an axis of the grid.

    Attributes:
        size: Its different places.
        stride: Chips from one place to the next; as many groups share the links.
        is_ring: Whether it goes around.
    """

    size: int
    stride: int
    is_ring: bool


@dataclass(frozen=True)
class Links:
    """The links of a slice."""

    topology: Topology

    @property
    def bytes_per_s(self) -> float:
        """Of one link in one direction: the vendor's figure of a chip, over its links (4 or 6) and both directions."""
        of_chip = CHIPS[self.topology.target].ici_bytes_per_s
        return _V4_LINK_BYTES_PER_S if of_chip is None else of_chip / (4 * len(self.topology.shape))

    def seconds(self, kind: Kind, num_bytes: int, groups: Sequence[Sequence[int]]) -> float:
        """The time of a collective.

        Args:
            kind: The collective; `permute_seconds` is for collective-permute.
            num_bytes: Bytes of the whole array: of an all-gather's result, else of the operand on one chip.
            groups: The chips of each group; all groups are alike.
        """
        group, spans = groups[0], self._spans(groups[0])
        if len(group) < 2 or not spans:
            return 0.0
        wait = HOP_S * sum(span.stride * (span.size // 2 if span.is_ring else span.size - 1) for span in spans)
        if kind == "all-to-all":
            crossing = max(span.size * span.stride / (8 if span.is_ring else 4) for span in spans)
            return max(wait, num_bytes * crossing / self.bytes_per_s)
        rate = self.bytes_per_s * sum((2 if span.is_ring else 1) / span.stride for span in spans)
        once = max(wait, num_bytes * (len(group) - 1) / len(group) / rate)
        return 2 * once if kind == "all-reduce" else once

    def permute_seconds(self, num_bytes: int, pairs: Iterable[tuple[int, int]]) -> float:
        """The time of a collective-permute that sends `num_bytes` from each source to its target."""
        ways = [list(self._way(source, target)) for source, target in pairs if source != target]
        if not ways:
            return 0.0
        load = Counter(link for way in ways for link in way)
        return max(HOP_S * max(map(len, ways)), num_bytes * max(load.values()) / self.bytes_per_s)

    def _spans(self, group: Sequence[int]) -> list[_Span]:
        """The axes of the grid that a group extends along."""
        found = []
        for axis, places in enumerate(zip(*(self.topology.coordinates(chip) for chip in group), strict=True)):
            different = sorted(set(places))
            if len(different) > 1:
                stride = min(b - a for a, b in pairwise(different))
                is_whole = len(different) * stride == self.topology.shape[axis]
                found.append(_Span(len(different), stride, self.topology.wraps[axis] and is_whole))
        return found

    def _way(self, source: int, target: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """The links from one chip to another: (chip, axis, direction)."""
        at, to = list(self.topology.coordinates(source)), self.topology.coordinates(target)
        for axis, size in enumerate(self.topology.shape):
            ahead = (to[axis] - at[axis]) % size
            wraps = self.topology.wraps[axis]
            step = (1 if ahead <= size - ahead else -1) if wraps else (1 if to[axis] > at[axis] else -1)
            while at[axis] != to[axis]:
                yield tuple(at), axis, step
                at[axis] = (at[axis] + step) % size
