"""The sections of the page: programs, operations, roofline, links. `page_modules` and `page_memory` have the others."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.aot.blocks import modules_text
from kp_dynamo.aot.figures import AotFigures
from kp_dynamo.aot.operation_text import dearest, origin_lines
from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.explanation.text_layout import counted
from kp_dynamo.hardware import CHIPS, DEVICES
from kp_dynamo.page.content import Cell, Lines, Picture, Section, Share, Table
from kp_dynamo.page.pictures import MAX_ROWS, Run, bars, left_out, timeline
from kp_dynamo.page.roofline import MAX_LABELS, Point, roofline
from kp_dynamo.page.units import size_text, time_text, unit_of_time

_KINDS = {"custom call": "custom call (at least)"}


def programs_section(report: AotFigures) -> Section:
    """The step as a timeline of programs, and a row for each."""
    by_name = {p.name: p for p in report.programs}
    calls = [call.program for call in report.calls] or [p.name for p in report.programs for _ in range(p.runs)]
    runs = [Run(name, by_name[name].modelled_ms, by_name[name].exposed_ms) for name in calls]
    rows = tuple(_program_row(p, report) for p in report.programs)
    details = tuple((modules_text(p),) if p.is_block else () for p in report.programs)
    table = Table(("program", "runs", "time", "share", "over the bound"), rows, details=details, folded=folded(report))
    word = CHIPS[report.target].device_word
    caption = (
        "Each row is a program, each bar a run of it, in the order of the step. In the table, the bound is the longer "
        f"of two times: its matmuls at the {word}'s peak, and its arguments and results at the memory's speed."
    )
    caption += left_out(len(report.programs), "programs")
    if report.slice is not None:
        caption += f" Thin bars: the {word} waits for its links."
    different = "" if len(calls) == len(report.programs) else f", {len(report.programs)} of them different"
    summary = f"A step runs {counted(len(calls), 'program')}{different}."
    return Section("programs", "The step", (Picture(timeline(runs), caption), table), summary)


def _program_row(p: ProgramReport, report: AotFigures) -> tuple[Cell, ...]:
    floor = max(p.flops_floor_ms(report.target), p.bytes_floor_ms(report.target))
    ms = p.modelled_ms + p.exposed_ms
    share = Share(p.runs * ms / report.step_ms if report.step_ms else 0.0)
    # A program that reads few rows of a large table takes less than the time to read all of it.
    return p.name, str(p.runs), time_text(p.runs * ms), share, f"{ms / floor:.1f}x" if floor and ms >= floor else "-"


def folded(report: AotFigures) -> str:
    """The title of a table that is closed, because it is longer than a screen."""
    return f"all {len(report.programs)} programs" if len(report.programs) > MAX_ROWS else ""


def operations_section(report: AotFigures, verbose: bool) -> Section:
    """What kinds of work take the time, and the operations that take most of it."""
    unit = unit_of_time(report.modelled_ms)
    kinds = {
        p.name: {_KINDS.get(kind, kind): p.runs * ms * unit.per_ms for kind, ms in sorted(p.ms_by_kind.items()) if ms}
        for p in report.programs
    }
    drawn = bars("kinds", "Time by kind of work", kinds, f"modelled {unit.name} of a step")
    caption = f"Where the modelled time goes, by kind of work.{left_out(len(kinds), 'programs')}"
    if report.custom_call_ms:
        caption += " Custom calls take at least that long."
    found = dearest(report)
    rows = tuple(
        (
            f"{f.kind}, {p.name}{f' x {p.runs}' if p.runs > 1 else ''} {f.title}",
            time_text(p.runs * f.modelled_ms),
            _share(report, p.runs * f.modelled_ms),
        )
        for f, p in found
    )
    details = tuple(tuple(origin_lines(f.origins, verbose)) for f, _ in found)
    table = Table(("operation", "time", "share"), rows, details=details)
    return Section("operations", "The most expensive operations", (Picture(drawn, caption), table))


def _share(report: AotFigures, ms: float) -> Share:
    return Share(ms / report.modelled_ms if report.modelled_ms else 0.0)


def roofline_section(report: AotFigures) -> Section:
    """Work per byte against speed."""
    device, points = DEVICES[report.target], list(_points(report))
    if not points:
        return Section("roofline", "Roofline", ())
    word = CHIPS[report.target].device_word
    caption = (
        f"Each point is a program. The slope is the bandwidth of the {word}'s memory, the top the peak of its matrix "
        "units: the farther below, the more time is lost to something else."
    )
    if len(points) > MAX_LABELS:
        caption += f" The {MAX_LABELS} of {len(points)} that take most of the step have names."
    drawn = roofline(points, device.bf16_flops, device.hbm_bytes_per_s)
    return Section("roofline", "Roofline", (Picture(drawn, caption),))


def _points(report: AotFigures) -> Iterator[Point]:
    for p in report.programs:
        if p.hbm_bytes and p.modelled_ms and p.flops:
            yield Point(p.name, p.flops, p.hbm_bytes, p.modelled_ms, p.runs * p.modelled_ms)


def links_section(report: AotFigures) -> Section:
    """The communication of one device; nothing without a slice."""
    if report.slice is None:
        return Section("links", "Links", ())
    rows = tuple(
        (
            f"{row.kind} along {row.axes}",
            str(row.count),
            size_text(row.num_bytes),
            time_text(row.link_ms),
            time_text(row.exposed_ms),
        )
        for row in report.collectives
    )
    table = Table(("collective", "count", "bytes", "on the links", "waits"), rows)
    share = report.exposed_ms / report.step_ms if report.step_ms else 0.0
    word = CHIPS[report.target].device_word
    summary = f"A {word} waits {time_text(report.exposed_ms)} of a step for its links, {share:.0%}; the rest overlaps."
    return Section("links", "Communication", (table,) if rows else (Lines(("None.",)),), summary)
