"""The memory of a step over time: what lives between its programs, and the peak of each program."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.explanation.text_layout import counted, first_of

_MIB = 2**20
_NUM_ROWS = 8
_MAX_COLUMNS = 96
_NUM_LISTED = 12


@dataclass(frozen=True)
class ProgramCall:
    """One run of a program in a step.

    Attributes:
        program: Its name.
        held_bytes: What the step holds beside the arguments of the program while it runs.
    """

    program: str
    held_bytes: int


@dataclass(frozen=True)
class MemoryPoint:
    """The memory at one run of a program.

    Attributes:
        program: Its name.
        live_bytes: What the step holds when the program starts, with its arguments.
        peak_bytes: The peak while it runs.
    """

    program: str
    live_bytes: int
    peak_bytes: int


def memory_line(programs: Iterable[ProgramReport], calls: Iterable[ProgramCall]) -> list[MemoryPoint]:
    """The memory at each run of a step, in order."""
    by_name = {program.name: program for program in programs}
    pairs = [(call, by_name[call.program]) for call in calls]
    return [MemoryPoint(p.name, c.held_bytes + p.argument_bytes, c.held_bytes + p.peak_bytes) for c, p in pairs]


def in_order(points: Sequence[MemoryPoint]) -> list[tuple[str, int]]:
    """The programs in the order of the step, and how often each runs in succession: [("2.forward", 32), ...]."""
    return [(name, len(list(group))) for name, group in itertools.groupby(point.program for point in points)]


def memory_chart(points: Sequence[MemoryPoint]) -> Iterator[str]:
    """A picture in characters, the order of the programs and the peak; nothing if the step has no recorded runs."""
    if not points:
        return
    most = max(points, key=lambda point: point.peak_bytes)
    yield f"memory over the step, {counted(len(points), 'run')}: # lives when a program starts, + is its own peak"
    yield from _bars(_columns(points), most.peak_bytes)
    names = [name if count == 1 else f"{name} x {count}" for name, count in in_order(points)]
    yield f"  in order: {', '.join(first_of(names, _NUM_LISTED))}"
    live, peak = most.live_bytes / _MIB, most.peak_bytes / _MIB
    number = points.index(most) + 1
    yield f"  most in run {number}, {most.program}: {live:.1f} MiB live when it starts, {peak:.1f} MiB at its peak"


def _columns(points: Sequence[MemoryPoint]) -> list[MemoryPoint]:
    """At most `_MAX_COLUMNS` points: several runs share a column, which shows the one with the highest peak."""
    size = math.ceil(len(points) / _MAX_COLUMNS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [max(group, key=lambda point: point.peak_bytes) for group in groups]


def _bars(columns: Sequence[MemoryPoint], top_bytes: int) -> Iterator[str]:
    """Rows from the top down; a column is at least one character wide, and four in a short step."""
    width = max(1, min(4, _MAX_COLUMNS // len(columns)))
    labels = [f"{top_bytes / _MIB:.0f} MiB", *[""] * (_NUM_ROWS - 2), f"{top_bytes / _MIB / _NUM_ROWS:.0f} MiB"]
    for row, label in zip(range(_NUM_ROWS, 0, -1), labels, strict=True):
        level = (row - 0.5) / _NUM_ROWS * top_bytes
        marks = ("#" if c.live_bytes >= level else "+" if c.peak_bytes >= level else " " for c in columns)
        yield f"  {label:>{len(labels[0])}} |{''.join(mark * width for mark in marks)}"
