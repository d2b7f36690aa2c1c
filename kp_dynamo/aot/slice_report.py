"""The part of a report that is about several chips: the slice, its collectives, and large tensors that are whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kp_dynamo.aot.timeline import TimedCollective
from kp_dynamo.sharding.mesh import NamedMesh


@dataclass(frozen=True)
class SliceReport:
    """The chips that a step runs on.

    Attributes:
        topology: The grid, such as "4x4".
        num_chips: Chips.
        num_hosts: Machines that they belong to.
        mesh: The axes and their sizes, such as "data=4,model=4".
        sharding: How the parameters lie on the mesh, as it was given.
        whole: One line for each tensor of more than 64 MiB that is whole on every chip.
    """

    topology: str
    num_chips: int
    num_hosts: int
    mesh: str
    sharding: str
    whole: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectiveReport:
    """The collectives of a kind and an axis in one run of a program.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all" or "collective-permute".
        axes: The axes of the mesh that they run along, such as "data" or "data+model".
        count: How many there are.
        num_bytes: Their bytes on one chip: of the results of all-gathers, of the operands of others.
        link_ms: Their time on the links.
        exposed_ms: The part in which the chip waits for them; the rest overlaps with compute.
    """

    kind: str
    axes: str
    count: int
    num_bytes: int
    link_ms: float
    exposed_ms: float


def collective_reports(found: Iterable[TimedCollective], mesh: NamedMesh) -> tuple[CollectiveReport, ...]:
    """One row for each kind and axis, the longest first."""
    groups: defaultdict[tuple[str, str], list[TimedCollective]] = defaultdict(list)
    for timed in found:
        groups[timed.collective.kind, timed.collective.axes(mesh)].append(timed)
    rows = [
        CollectiveReport(
            kind=kind,
            axes=axes,
            count=sum(t.times for t in timed),
            num_bytes=sum(t.times * t.collective.num_bytes for t in timed),
            link_ms=sum(t.times * t.seconds for t in timed) * 1e3,
            exposed_ms=sum(t.exposed_s for t in timed) * 1e3,
        )
        for (kind, axes), timed in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.link_ms))


def added_up(runs: Iterable[tuple[int, tuple[CollectiveReport, ...]]]) -> tuple[CollectiveReport, ...]:
    """The collectives of a step, from those of its programs and how often each runs."""
    groups: defaultdict[tuple[str, str], list[tuple[int, CollectiveReport]]] = defaultdict(list)
    for times, rows in runs:
        for row in rows:
            groups[row.kind, row.axes].append((times, row))
    summed = [
        CollectiveReport(
            kind=kind,
            axes=axes,
            count=sum(n * r.count for n, r in rows),
            num_bytes=sum(n * r.num_bytes for n, r in rows),
            link_ms=sum(n * r.link_ms for n, r in rows),
            exposed_ms=sum(n * r.exposed_ms for n, r in rows),
        )
        for (kind, axes), rows in groups.items()
    ]
    return tuple(sorted(summed, key=lambda row: -row.link_ms))


def slice_from_dict(content: Mapping[str, Any] | None) -> SliceReport | None:
    """The inverse of `dataclasses.asdict`; None for one chip."""
    return None if content is None else SliceReport(**{**content, "whole": tuple(content["whole"])})
