"""The most expensive operations and the custom calls of a report, as text. Their figures are for all runs of a step."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.aot.blocks import modules_text, runs_text
from kp_dynamo.aot.figures import AotFigures
from kp_dynamo.aot.program_report import FusionReport, Origin, ProgramReport
from kp_dynamo.explanation.text_layout import first_of, table
from kp_dynamo.graph.places import Place
from kp_dynamo.page.units import time_unit

_MIB = 2**20
_NUM_DEAREST = 12
_NUM_CALLS = 20
_NUM_ORIGINS = 3


def dearest(report: AotFigures) -> list[tuple[FusionReport, ProgramReport]]:
    """The operations that take most of the step, each with its program."""
    found = [(fusion, program) for program in report.programs for fusion in program.dearest]
    return sorted(found, key=lambda pair: -pair[1].runs * pair[0].modelled_ms)[:_NUM_DEAREST]


def dearest_lines(report: AotFigures, verbose: bool) -> Iterator[str]:
    """The operations that take most of the step."""
    found = dearest(report)
    yield "most expensive operations"
    for row, (fusion, program) in zip(table([_costs(report, *pair) for pair in found], num_left=0), found, strict=True):
        yield f"  {row}  {fusion.kind}, {program.name} {fusion.title}{_runs(program)}"
        yield from (f"      {line}" for line in origin_lines(fusion.origins, verbose))


def custom_call_lines(report: AotFigures, verbose: bool) -> Iterator[str]:
    """The custom calls, in the order of the programs."""
    found = [(call, p) for p in report.programs for call in p.custom_calls]
    if found:
        yield f"custom calls, without cycles; at least, by FLOPs at the bfloat16 peak or bytes once: {len(found)}"
    unit = time_unit(report.modelled_ms)
    for call, program in found[: None if verbose else _NUM_CALLS]:
        runs = program.runs
        work = "declares no FLOPs" if call.flops is None else f"{runs * call.flops / 1e9:.2f} GFLOP"
        moved = f"{runs * call.hbm_bytes / _MIB:.1f} MiB to and from the chip's memory"
        least = unit.text(runs * call.roofline_ms, 4)
        yield f"  {least}  {work}, {moved}, {program.name} {call.name}{_runs(program)}"
        yield from (f"      {line}" for line in origin_lines(call.origins, verbose))


def _costs(report: AotFigures, fusion: FusionReport, program: ProgramReport) -> tuple[str, str, str]:
    milliseconds = program.runs * fusion.modelled_ms
    share = milliseconds / report.modelled_ms if report.modelled_ms else 0
    opaque = "no cycles: its roofline" if fusion.kind == "custom call" else "no cycles"
    cycles = opaque if fusion.cycles is None else f"{program.runs * fusion.cycles} cycles"
    return time_unit(report.modelled_ms).text(milliseconds, 4), f"{share:.0%}", cycles


def _runs(program: ProgramReport) -> str:
    if program.is_block:
        return f", {runs_text(program)}: {modules_text(program)}"
    return f", {program.runs} times a step" if program.runs > 1 else ""


def origin_lines(origins: tuple[Origin, ...], verbose: bool) -> Iterator[str]:
    """Each place once, with the operators that come from it."""
    ops: dict[str, list[str]] = {}
    for origin in origins:
        ops.setdefault(Place(origin.line, origin.module).text(verbose), []).append(origin.op)
    lines = [f"{', '.join(dict.fromkeys(names))} {place}".rstrip() for place, names in ops.items()]
    return first_of(lines, None if verbose else _NUM_ORIGINS)
