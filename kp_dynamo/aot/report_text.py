"""A report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kp_dynamo.aot.blocks import runs_text
from kp_dynamo.aot.figures import DISCLAIMER, AotFigures
from kp_dynamo.aot.memory_line import memory_chart
from kp_dynamo.aot.operation_text import custom_call_lines, dearest_lines
from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.aot.slice_text import counted_text, slice_lines, step_lines, where_text
from kp_dynamo.explanation.pass_text import pass_lines
from kp_dynamo.explanation.report_text import fallback_place
from kp_dynamo.explanation.text_layout import first_of, table, wrapped
from kp_dynamo.graph.places import short_line
from kp_dynamo.hardware import DEVICES, GB
from kp_dynamo.page.units import TimeUnit, are_far_apart, price, time_unit

_MIB = 2**20
_NUM_LISTED = 20
_CLOCKS = {"tpu": "tpu (CPU seconds of other processes)"}  # all others are of the wall clock


def text_of(report: AotFigures, verbose: bool = False) -> str:
    """Sections: headline, memory, programs, repeated layers, operations, passes, seconds."""
    return wrapped(
        [
            *_headline(report),
            "",
            *_memory(report),
            "",
            *_programs(report),
            "",
            *slice_lines(report, verbose),
            *_blocks(report),
            *dearest_lines(report, verbose),
            *custom_call_lines(report, verbose),
            *_listed("no estimate from the compiler, counted as no cycles", report.unknown, verbose),
            *_listed("graph breaks", [short_line(line) for line in report.graph_breaks], verbose),
            *_listed("on the CPU in between, in no figure here", _fallbacks(report, verbose), verbose),
            *_passes(report, verbose),
            "",
            f"seconds: {', '.join(f'{_CLOCKS.get(s, s)} {value:.2f}' for s, value in report.seconds.items())}",
            f"memory of this process: at most {report.peak_host_mib:.0f} MiB",
            f"versions: {', '.join(f'{name} {value}' for name, value in report.versions.items())}",
            *([f"flags of libtpu: {report.libtpu_flags}"] if report.libtpu_flags else []),
            DISCLAIMER,
        ]
    )


def _headline(report: AotFigures) -> Iterator[str]:
    device = DEVICES[report.target]
    mode = "training step" if report.train else "inference"
    options = ", ".join(f"{k}={v!r}" for k, v in report.options.items()) or "default options"
    where = where_text(report) if report.slice is None else f"{where_text(report)},"
    yield f"{mode} on {where} through {report.backend}, {options}"
    yield from step_lines(report)
    unit = time_unit(report.modelled_ms)
    by_cycles = unit.text(report.estimated_ms)
    yield f"  modelled        {unit.text(report.modelled_ms)}    (by the compiler's cycles {by_cycles})"
    if reason := which_to_believe(report):
        yield f"                  {reason}"
    if report.custom_call_ms:
        yield (
            f"  custom calls    {unit.text(report.custom_call_ms)} of the modelled time, by their rooflines: they take "
            "at least that, and the cycles have nothing of it"
        )
    by_flops, by_bytes = unit.text(report.flops_floor_ms), unit.text(report.bytes_floor_ms)
    yield (
        f"  lower bounds    {by_flops} for the matmuls at {device.bf16_flops / 1e12:.0f} TFLOP/s, "
        f"{by_bytes} for arguments and results at {device.hbm_bytes_per_s / 1e9:.0f} GB/s"
    )
    hardware = f" ({report.hfu:.1%} with recomputed matmuls)" if report.recomputed_flops else ""
    utilization = f"model FLOP utilization {report.mfu:.1%}{hardware}{counted_text(report)}"
    yield f"  over the bounds {report.over_floor:.2f}x, {utilization}"
    yield f"  work            {report.flops / 1e9:.2f} GFLOP, {report.bytes / GB:.3f} GB touched, by the compiler"
    tokens = report.usd_per_million_tokens
    by_token = "" if tokens is None else f", {price(tokens, 'tokens')}"
    by_step = price(report.usd_per_million_steps, "steps")
    yield f"  price           {report.usd_per_hour:.2f} USD an hour: {by_step}{by_token}"
    yield f"  float32 matmuls at precision {report.matmul_precision!r}"


def which_to_believe(report: AotFigures) -> str:
    """Why the two estimates differ, if they do by much, else "". `calibration` has the measurements."""
    modelled, by_cycles = report.modelled_ms, report.estimated_ms
    if not are_far_apart(modelled, by_cycles):
        return ""
    if by_cycles > modelled:
        return (
            "believe the modelled time: on a chip, elementwise operations on data in vector memory took 1/4 to 1/14 of "
            "their cycles"
        )
    return (
        "believe the modelled time: gathers, relayouts and custom calls have no cycles, and it counts their rows, "
        "bytes and FLOPs"
    )


def _memory(report: AotFigures) -> Iterator[str]:
    device = DEVICES[report.target]
    verdict = "fits" if report.fits else "DOES NOT FIT"
    yield (
        f"memory: {verdict}. The step takes {report.step_peak_bytes / _MIB:.1f} MiB at its peak, its largest program "
        f"{report.peak_bytes / _MIB:.1f} MiB; allowed are "
        f"{report.memory_budget_bytes / _MIB:.0f} of {device.hbm_bytes / _MIB:.0f} MiB."
    )
    yield from (f"  {note}" for note in device.notes)
    yield from memory_chart(report.memory_line)


def _programs(report: AotFigures) -> Iterator[str]:
    unit = time_unit(report.modelled_ms)
    titles = (
        "program",
        "runs",
        f"modelled {unit.name}",
        f"calls {unit.name}",
        f"cycles {unit.name}",
        "peak MiB",
        "arguments",
        "results",
        "temporary",
        "code",
        "compile s",
    )
    yield from table([titles, *(_row(p, unit) for p in report.programs)])


def _blocks(report: AotFigures) -> Iterator[str]:
    """One row for each repeated layer: its figures are for all its runs, and its peak is that of the step."""
    found = report.blocks
    if not found:
        return
    yield "repeated layers, compiled once"
    unit = time_unit(report.modelled_ms)
    rows = [("", "programs", f"modelled {unit.name}", "share", f"cycles {unit.name}", "peak MiB")]
    for block in found:
        share = block.modelled_ms / report.modelled_ms if report.modelled_ms else 0
        times = (unit.number(block.modelled_ms), f"{share:.0%}", unit.number(block.estimated_ms))
        programs = block.programs[0].split(".")[0] + ".*"
        rows.append((runs_text(block), programs, *times, f"{block.step_peak_bytes / _MIB:.1f}"))
    modules = ["", *(block.modules for block in found)]
    yield from (f"  {row}  {module}".rstrip() for row, module in zip(table(rows, 2), modules, strict=True))
    yield ""


def _row(p: ProgramReport, unit: TimeUnit) -> tuple[str, ...]:
    sizes = (p.peak_bytes, p.argument_bytes, p.output_bytes, p.temp_bytes, p.generated_code_bytes)
    calls = unit.number(p.custom_call_ms) if p.custom_calls else "-"
    times = (unit.number(p.modelled_ms), calls, unit.number(p.estimated_ms))
    return (p.name, str(p.runs), *times, *(f"{size / _MIB:.1f}" for size in sizes), f"{p.compile_s:.1f}")


def _fallbacks(report: AotFigures, verbose: bool) -> Sequence[str]:
    found = report.fallback_reports
    return [f"{f.graph} {f.op} {fallback_place(f, verbose)}".rstrip() for f in found] or report.fallbacks


def _passes(report: AotFigures, verbose: bool) -> Iterator[str]:
    if report.pass_reports:
        return pass_lines(report.pass_reports, verbose)
    return _listed("passes", report.passes, verbose)


def _listed(title: str, lines: Sequence[str], verbose: bool) -> Iterator[str]:
    if lines:
        yield f"{title}: {len(lines)}"
        yield from (f"  {line}" for line in first_of(lines, None if verbose else _NUM_LISTED))
