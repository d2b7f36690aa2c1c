"""The memory of a step, for its page: over time, at the peak by module, and of each program."""

from __future__ import annotations

from collections import Counter

from kp_dynamo.aot.figures import AotFigures
from kp_dynamo.aot.live_values import LiveValues, by_part, num_bytes
from kp_dynamo.aot.page_sections import folded
from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.hardware import CHIPS
from kp_dynamo.page.content import Cell, Lines, Part, Picture, Section, Share, Table
from kp_dynamo.page.pictures import memory_over_time
from kp_dynamo.page.units import size_text, unit_of_size

_NUM_LISTED = 16


def memory_section(report: AotFigures) -> Section:
    """Memory over the step, what lives at the peak, and what each program allocates."""
    largest = max(report.programs, key=lambda p: p.held_bytes + p.peak_bytes)
    told = ", ".join(f"{size_text(size)} {name}" for name, size in _parts(report, largest).items() if size)
    summary = f"The peak is {size_text(report.step_peak_bytes)}, in {largest.name}: {told}."
    parts: tuple[Part, ...] = (*_pictures(report), *_at_the_peak(report, largest), *_by_program(report, largest))
    return Section("memory", "Memory", parts, summary)


def _parts(report: AotFigures, largest: ProgramReport) -> dict[str, int]:
    """What the peak is made of: by kind if it is known, else as the compiler tells it."""
    kinds = Counter[str]()
    for row in report.live_at_peak:
        kinds[row.kind] += row.num_bytes
    compiled = {"the step holds beside it": largest.held_bytes, "arguments": largest.argument_bytes}
    return {**(dict(kinds.most_common()) or compiled), **_of_the_compiler(largest)}


def _pictures(report: AotFigures) -> tuple[Picture, ...]:
    points = report.memory_line
    if not points:
        return ()
    live, peaks = [p.live_bytes for p in points], [p.peak_bytes for p in points]
    svg = memory_over_time(live, peaks, report.memory_budget_bytes)
    return (Picture(svg, "Memory over the step, at each run of a program."),)


def _by_program(report: AotFigures, largest: ProgramReport) -> tuple[Table, Lines]:
    head = ("program", "arguments", "results", "temporary", "code", "peak")
    unit = unit_of_size(largest.peak_bytes)
    rows = tuple((p.name, *(unit.number(size) for size in _sizes(p))) for p in report.programs)
    notes = Lines((f"In {unit.name}, by the compiler.", *CHIPS[report.target].notes))
    return Table(head, rows, folded=folded(report)), notes


def _sizes(p: ProgramReport) -> tuple[int, ...]:
    return p.argument_bytes, p.output_bytes, p.temp_bytes, p.generated_code_bytes, p.peak_bytes


def _at_the_peak(report: AotFigures, largest: ProgramReport) -> tuple[Table, ...]:
    """What lives at the peak, by module, and what only the compiler knows of; nothing if it is unknown."""
    live, peak = report.live_at_peak, report.step_peak_bytes
    if not live or not peak:
        return ()
    shown, rest = live[:_NUM_LISTED], live[_NUM_LISTED:]
    rows = [_live_row(row, peak) for row in shown]
    if rest:
        rows.append((f"{len(rest)} smaller rows", "", *_size(num_bytes(rest), peak)))
    rows += [(what, largest.name, *_size(size, peak)) for what, size in _of_the_compiler(largest).items() if size]
    by_compiler = largest.held_bytes + largest.argument_bytes
    caption = (
        "Rows of a module are counted from the graphs, without padding: "
        f"{size_text(num_bytes(live))} together. The compiler allocates {size_text(by_compiler)} for the same values. "
        "Rows of a program are the compiler's figures, which have no modules. The gradients that a backward begins "
        "with count as inputs."
    )
    table = Table(("at the peak", "module or program", "bytes", "share"), tuple(rows), 2, caption=caption)
    return table, _parts_at_the_peak(live, peak)


def _parts_at_the_peak(live: tuple[LiveValues, ...], peak: int) -> Table:
    """The same by module alone: parameters, activations and gradients together."""
    parts = [(name or "-", *_size(size, peak)) for name, size in by_part(live).items()]
    title = "At the peak, by module: parameters, activations and gradients together"
    return Table(("module", "bytes", "share"), tuple(parts[:_NUM_LISTED]), folded=title)


def _live_row(row: LiveValues, peak: int) -> tuple[Cell, ...]:
    equal = f" x {row.num_modules}" if row.num_modules > 1 else ""
    return row.kind, f"{row.module}{equal}" or "-", *_size(row.num_bytes, peak)


def _size(size: int, peak: int) -> tuple[Cell, Cell]:
    return size_text(size), Share(size / peak)


def _of_the_compiler(p: ProgramReport) -> dict[str, int]:
    results, code = p.output_bytes - p.alias_bytes, p.generated_code_bytes
    temporaries = max(0, p.peak_bytes - p.argument_bytes - results - code)  # that live at once
    return {"results": results, "temporaries": temporaries, "code": code}
