"""The pictures of a page, from plain figures: programs over time, kinds of work, memory over time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kp_dynamo.page.drawing import INK, SERIES, STOP, Drawing, in_page_colors
from kp_dynamo.page.units import unit_of_size, unit_of_time

_ROW_INCHES = 0.3
_PART_INCHES = 0.05
MAX_ROWS = 24
_MAX_NAME = 18
_NEAR = 4.0  # a limit more than this many times as high as all else would flatten the picture
_LEGEND_COLUMNS = 3


@dataclass(frozen=True)
class Run:
    """A run of a program: its name, its time, and how long the chip then waits for its links."""

    program: str
    ms: float
    waits_ms: float = 0.0


def clipped(name: str, most: int = _MAX_NAME) -> str:
    """A name that fits a picture: its end tells programs apart, its beginning tells the model."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}...{name[-(most // 2 - 2) :]}"


@in_page_colors
def bars(name: str, title: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One bar a row, of parts in the order of their first appearance; the longest `MAX_ROWS`."""
    kept = _longest({row: sum(parts.values()) for row, parts in rows.items()})
    shown = {row: rows[row] for row in kept}
    parts = dict.fromkeys(part for row in shown.values() for part in row)
    drawing = Drawing(name, _height(len(shown), 1 + len(parts) // _LEGEND_COLUMNS), title)
    left = [0.0] * len(shown)
    for part, color in zip(parts, itertools.cycle(SERIES), strict=False):
        sizes = [row.get(part, 0.0) for row in shown.values()]
        drawing.axes.barh(range(len(shown)), sizes, left=left, height=0.7, label=part, color=color)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    _name_rows(drawing, [clipped(row) for row in shown])
    drawing.axes.set(xlabel=unit)
    drawing.legend(_LEGEND_COLUMNS)
    return drawing.svg()


@in_page_colors
def parts_apart(name: str, title: str, rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A thin bar for each part of a row, all from zero: parts that may overlap must not look like a sum."""
    kept = _longest({row: max(parts.values(), default=0.0) for row, parts in rows.items()})
    parts = list(dict.fromkeys(part for row in kept for part in rows[row]))
    thickness = 0.8 / max(1, len(parts))
    height = _height(len(kept), 1 + len(parts) // _LEGEND_COLUMNS) + _PART_INCHES * len(parts) * len(kept)
    drawing = Drawing(name, height, title)
    for i, (part, color) in enumerate(zip(parts, itertools.cycle(SERIES), strict=False)):
        places = [row - 0.4 + (i + 0.5) * thickness for row in range(len(kept))]
        sizes = [rows[row].get(part, 0.0) for row in kept]
        drawing.axes.barh(places, sizes, height=thickness, label=part, color=color)
    _name_rows(drawing, [clipped(row) for row in kept])
    drawing.axes.set(xlabel=unit)
    drawing.legend(_LEGEND_COLUMNS)
    return drawing.svg()


@in_page_colors
def timeline(runs: Sequence[Run]) -> str:
    """The runs of a step in order, a row for each of the longest `MAX_ROWS` programs; thin bars wait for the links."""
    unit = unit_of_time(sum(run.ms + run.waits_ms for run in runs))
    starts = [0.0, *itertools.accumulate((run.ms + run.waits_ms) * unit.per_ms for run in runs)]
    times: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        times[run.program] += run.ms + run.waits_ms
    shown = _longest(times)
    drawing = Drawing("timeline", _height(len(shown), 0), "Programs of a step over time")
    for row, program in enumerate(shown):
        color = SERIES[row % len(SERIES)]
        for start, run in ((s, r) for s, r in zip(starts, runs, strict=False) if r.program == program):
            computes, waits = run.ms * unit.per_ms, run.waits_ms * unit.per_ms
            drawing.axes.barh(row, computes, left=start, height=0.7, color=color, edgecolor="none")
            if waits:
                drawing.axes.barh(row, waits, left=start + computes, height=0.25, color=STOP, edgecolor="none")
    _name_rows(drawing, [clipped(program) for program in shown])
    drawing.axes.set(xlabel=f"{unit.name} since the step began", xlim=(0, starts[-1] or 1))
    return drawing.svg()


@in_page_colors
def memory_over_time(live: Sequence[float], peaks: Sequence[float], limit: float) -> str:
    """What lives when each program starts, and its peak; `limit` is drawn if it is near."""
    unit = unit_of_size(max(peaks))
    drawing = Drawing("memory", 2.8, "Memory at each run of a program")
    axes, runs = drawing.axes, range(1, len(live) + 1)
    lived, peak = ([size / unit.num_bytes for size in sizes] for sizes in (live, peaks))
    axes.bar(runs, peak, width=1.0, color=SERIES[1], label="peak of the program")
    axes.bar(runs, lived, width=1.0, color=SERIES[0], label="live when it starts")
    top = max(peak) * 1.15
    if limit <= _NEAR * max(peaks):
        axes.axhline(limit / unit.num_bytes, color=STOP, linestyle="--", label="allowed")
        top = max(top, limit / unit.num_bytes * 1.05)
    at = peak.index(max(peak))
    side = "right" if at > len(peak) / 2 else "left"
    label = {"xytext": (0, 3), "textcoords": "offset points", "ha": side, "va": "bottom", "color": INK}
    axes.annotate(f"{unit.text(max(peaks))}", (runs[at], peak[at]), **label)
    axes.set(xlabel="runs of programs, in order", ylabel=unit.name, ylim=(0, top), xlim=(0.5, len(live) + 0.5))
    axes.xaxis.get_major_locator().set_params(integer=True)
    drawing.legend(_LEGEND_COLUMNS)
    return drawing.svg()


def left_out(number: int, noun: str) -> str:
    """ " The 24 longest of 40 programs are shown.", for a caption; "" if all are."""
    return f" The {MAX_ROWS} longest of {number} {noun} are shown." if number > MAX_ROWS else ""


def _longest(sizes: Mapping[str, float]) -> list[str]:
    """The `MAX_ROWS` with the largest sizes, in their order."""
    largest = sorted(sizes, key=lambda name: -sizes[name])[:MAX_ROWS]
    return [name for name in sizes if name in largest]


def _height(num_rows: int, legend_rows: int) -> float:
    return 0.75 + _ROW_INCHES * num_rows + 0.25 * legend_rows


def _name_rows(drawing: Drawing, names: Sequence[str]) -> None:
    drawing.axes.set_yticks(range(len(names)), names)
    drawing.axes.tick_params(axis="y", length=0)
    drawing.axes.invert_yaxis()
