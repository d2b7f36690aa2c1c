"""The time of a collective on the links of a slice.

V is the size of the whole array that the n chips of a group share, and W what a chip sends a second along one axis of
the grid: both directions together on a ring, one direction on a line (an axis without wrap-around link). A group may
span several axes of the grid; each of them carries a part. If its places along an axis are s chips apart, s groups
share the links there, so each has a part of W.

    all-gather, reduce-scatter   V (n - 1) / n / sum of W
    all-reduce                   twice that: a reduce-scatter and an all-gather
    all-to-all                   half of each half's data crosses the middle of the longest axis
    collective-permute           the most loaded link, with each message on the shortest way, one axis after the other

Each takes at least a microsecond a hop. Source: jax-ml.github.io/scaling-book/sharding, where n is large.

A chip of v7 is two devices, which share its links to other chips. A link of its own joins the two, six times as fast as
one of the others (cloud.google.com/tpu/docs/tpu7x, "Dual-chiplet architecture"). Both kinds work at the same time, so a
collective takes the longer of two times:

1. Between the chips, as above. If a group has both devices of its chips, n counts chips: data enters a chip once. If it
   has one of them, the other one has a group of its own, and each group has half of W. Of an all-to-all, the data of
   both devices crosses the middle.
2. Within the chips, if a group has both devices: each sends half of V to the other one. In a reduce-scatter, that is
   the half that it does not sum up; in an all-gather, its own part and the half that came in from other chips; in an
   all-to-all, what is for the other half of the group. No hop counts: no figure of its latency is published.
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
_WITHIN_CHIP = 6
"""Speed of the link between the two devices of a chip over that of a link between chips (see above)."""


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

    @property
    def bytes_per_s_within_chip(self) -> float:
        """Of the link between the two devices of a chip, in one direction."""
        return _WITHIN_CHIP * self.bytes_per_s

    def seconds(self, kind: Kind, num_bytes: int, groups: Sequence[Sequence[int]]) -> float:
        """The time of a collective.

        Args:
            kind: The collective; `permute_seconds` is for collective-permute.
            num_bytes: Bytes of the whole array: of an all-gather's result, else of the operand on one device.
            groups: The devices of each group; all groups are alike.
        """
        chips = sorted(set(map(self.topology.chip_of, groups[0])))
        num_each = len(groups[0]) // len(chips)  # devices of a chip that are in the group
        between = self._seconds_between(kind, num_bytes, chips, self.topology.devices_per_chip // num_each)
        within = num_bytes / 2 / self.bytes_per_s_within_chip if num_each > 1 else 0.0
        return max(between, 2 * within if kind == "all-reduce" else within)

    def _seconds_between(self, kind: Kind, num_bytes: int, chips: Sequence[int], num_sharing: int) -> float:
        """The time on the links between chips, of which `num_sharing` groups share each."""
        spans = self._spans(chips)
        if not spans:
            return 0.0
        wait = HOP_S * sum(span.stride * (span.size // 2 if span.is_ring else span.size - 1) for span in spans)
        if kind == "all-to-all":
            crossing = max(span.size * span.stride / (8 if span.is_ring else 4) for span in spans)
            return max(wait, num_bytes * self.topology.devices_per_chip * crossing / self.bytes_per_s)
        rate = self.bytes_per_s * sum((2 if span.is_ring else 1) / span.stride for span in spans) / num_sharing
        once = max(wait, num_bytes * (len(chips) - 1) / len(chips) / rate)
        return 2 * once if kind == "all-reduce" else once

    def permute_seconds(self, num_bytes: int, pairs: Iterable[tuple[int, int]]) -> float:
        """The time of a collective-permute that sends `num_bytes` from each source to its target."""
        sent = [(source, target) for source, target in pairs if source != target]
        ways = [list(self._way(source, target)) for source, target in sent]
        load = Counter(link for way in ways for link in way)
        hops, most = max(map(len, ways), default=0), max(load.values(), default=0)
        # A device gets one message, so none shares the link within its chip.
        devices = self.topology.devices_per_chip
        crosses = any(source % devices != target % devices for source, target in sent)
        within = num_bytes / self.bytes_per_s_within_chip if crosses else 0.0
        return max(HOP_S * hops, num_bytes * most / self.bytes_per_s, within)

    def _spans(self, chips: Sequence[int]) -> list[_Span]:
        """The axes of the grid that the chips of a group extend along."""
        found, devices = [], self.topology.devices_per_chip
        for axis, places in enumerate(zip(*(self.topology.coordinates(c * devices) for c in chips), strict=True)):
            different = sorted(set(places))
            if len(different) > 1:
                stride = min(b - a for a, b in pairwise(different))
                is_whole = len(different) * stride == self.topology.shape[axis]
                found.append(_Span(len(different), stride, self.topology.wraps[axis] and is_whole))
        return found

    def _way(self, source: int, target: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """The links between chips from one device to another: (chip, axis, direction)."""
        at, to = list(self.topology.coordinates(source)), self.topology.coordinates(target)
        for axis, size in enumerate(self.topology.shape):
            ahead = (to[axis] - at[axis]) % size
            wraps = self.topology.wraps[axis]
            step = (1 if ahead <= size - ahead else -1) if wraps else (1 if to[axis] > at[axis] else -1)
            while at[axis] != to[axis]:
                yield tuple(at), axis, step
                at[axis] = (at[axis] + step) % size
