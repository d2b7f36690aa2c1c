"""A report as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kp_dynamo.aot.figures import DISCLAIMER, AotFigures
from kp_dynamo.aot.program_report import FusionReport, Origin, ProgramReport
from kp_dynamo.explanation.pass_text import pass_lines
from kp_dynamo.explanation.report_text import fallback_place
from kp_dynamo.explanation.text_layout import first_of, table, wrapped
from kp_dynamo.graph.places import Place, short_line
from kp_dynamo.hardware import CHIPS, GB

_MIB = 2**20
_NUM_ORIGINS = 3
_NUM_LISTED = 20


def text_of(report: AotFigures, verbose: bool = False) -> str:
    """Sections: headline, memory, programs, dearest operations, operations without an estimate, seconds."""
    return wrapped(
        [
            *_headline(report),
            "",
            *_memory(report),
            "",
            *_programs(report),
            "",
            *_dearest(report, verbose),
            *_custom_calls(report, verbose),
            *_listed("no estimate from the compiler, counted as no cycles", report.unknown, verbose),
            *_listed("graph breaks", [short_line(line) for line in report.graph_breaks], verbose),
            *_listed("on the CPU in between, in no figure here", _fallbacks(report, verbose), verbose),
            *_passes(report, verbose),
            "",
            f"seconds: {', '.join(f'{stage} {value:.2f}' for stage, value in report.seconds.items())}",
            f"memory of this process: at most {report.peak_host_mib:.0f} MiB",
            f"versions: {', '.join(f'{name} {value}' for name, value in report.versions.items())}",
            DISCLAIMER,
        ]
    )


def _headline(report: AotFigures) -> Iterator[str]:
    chip = CHIPS[report.target]
    mode = "training step" if report.train else "inference"
    options = ", ".join(f"{k}={v!r}" for k, v in report.options.items()) or "default options"
    yield f"{mode} on one {report.target} through {report.backend}, {options}"
    yield f"  modelled        {report.modelled_ms:.3f} ms    (by the compiler's cycles {report.estimated_ms:.3f} ms)"
    if report.custom_call_ms:
        yield (
            f"  custom calls    {report.custom_call_ms:.3f} ms of the modelled time, by their rooflines: they take at "
            "least that, and the cycles have nothing of it"
        )
    yield (
        f"  floors          {report.flops_floor_ms:.3f} ms for the matmuls at {chip.bf16_flops / 1e12:.0f} TFLOP/s, "
        f"{report.bytes_floor_ms:.3f} ms for arguments and results at {chip.hbm_bytes_per_s / 1e9:.0f} GB/s"
    )
    yield f"  over the floors {report.over_floor:.2f}x, model FLOP utilisation {report.mfu:.1%}"
    yield f"  work            {report.flops / 1e9:.2f} GFLOP, {report.bytes / GB:.3f} GB touched, by the compiler"
    tokens = report.usd_per_million_tokens
    by_token = "" if tokens is None else f", {tokens:.6f} USD per million tokens"
    yield (
        f"  price           {chip.usd_per_hour:.2f} USD an hour: {report.usd_per_million_steps:.2f} USD per million "
        f"steps{by_token}"
    )
    yield f"  float32 matmuls at precision {report.matmul_precision!r}"


def _memory(report: AotFigures) -> Iterator[str]:
    chip = CHIPS[report.target]
    verdict = "fits" if report.fits else "DOES NOT FIT"
    yield (
        f"memory: {verdict}. The step takes {report.step_peak_bytes / _MIB:.1f} MiB at its peak, its largest program "
        f"{report.peak_bytes / _MIB:.1f} MiB; allowed are "
        f"{report.memory_budget_bytes / _MIB:.0f} of {chip.hbm_bytes / _MIB:.0f} MiB."
    )
    yield from (f"  {note}" for note in chip.notes)


def _programs(report: AotFigures) -> Iterator[str]:
    titles = (
        "program",
        "runs",
        "modelled ms",
        "calls ms",
        "cycles ms",
        "peak MiB",
        "arguments",
        "results",
        "temporary",
        "code",
        "compile s",
    )
    yield from table([titles, *(_row(p) for p in report.programs)])


def _row(p: ProgramReport) -> tuple[str, ...]:
    sizes = (p.peak_bytes, p.argument_bytes, p.output_bytes, p.temp_bytes, p.generated_code_bytes)
    calls = f"{p.custom_call_ms:.3f}" if p.custom_calls else "-"
    times = (f"{p.modelled_ms:.3f}", calls, f"{p.estimated_ms:.3f}")
    return (p.name, str(p.runs), *times, *(f"{size / _MIB:.1f}" for size in sizes), f"{p.compile_s:.1f}")


def _dearest(report: AotFigures, verbose: bool) -> Iterator[str]:
    found = sorted(((f, p) for p in report.programs for f in p.dearest), key=_of_a_step)[:12]
    yield "dearest operations"
    for row, (fusion, program) in zip(table([_costs(report, *pair) for pair in found], num_left=0), found, strict=True):
        yield f"  {row}  {fusion.kind}, {program.name} {fusion.name}{_times(program)}"
        yield from (f"      {line}" for line in _origin_lines(fusion.origins, verbose))


def _costs(report: AotFigures, fusion: FusionReport, program: ProgramReport) -> tuple[str, str, str]:
    share = program.runs * fusion.modelled_ms / report.modelled_ms if report.modelled_ms else 0
    opaque = "no cycles: its roofline" if fusion.kind == "custom call" else "no cycles"
    cycles = opaque if fusion.cycles is None else f"{fusion.cycles} cycles"
    return f"{fusion.modelled_ms:.4f} ms", f"{share:.0%}", cycles


def _custom_calls(report: AotFigures, verbose: bool) -> Iterator[str]:
    found = [(call, p) for p in report.programs for call in p.custom_calls]
    if found:
        yield f"custom calls, without cycles; at least, by FLOPs at the bfloat16 peak or bytes once: {len(found)}"
    for call, program in found[: None if verbose else 20]:
        work = "declares no FLOPs" if call.flops is None else f"{call.flops / 1e9:.2f} GFLOP"
        moved = f"{call.hbm_bytes / _MIB:.1f} MiB to and from the chip's memory"
        yield f"  {call.roofline_ms:.4f} ms  {work}, {moved}, {program.name} {call.name}{_times(program)}"
        yield from (f"      {line}" for line in _origin_lines(call.origins, verbose))


def _times(program: ProgramReport) -> str:
    return f", {program.runs} times a step" if program.runs > 1 else ""


def _of_a_step(pair: tuple[FusionReport, ProgramReport]) -> float:
    """Sort key: the most expensive operations of a step first."""
    fusion, program = pair
    return -program.runs * fusion.modelled_ms


def _origin_lines(origins: tuple[Origin, ...], verbose: bool) -> Iterator[str]:
    """Each place once, with the operators that come from it."""
    ops: dict[str, list[str]] = {}
    for origin in origins:
        ops.setdefault(Place(origin.line, origin.module).text(verbose), []).append(origin.op)
    lines = [f"{', '.join(dict.fromkeys(names))} {place}".rstrip() for place, names in ops.items()]
    return first_of(lines, None if verbose else _NUM_ORIGINS)


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
