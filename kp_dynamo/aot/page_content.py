"""The report of a compiled step as a page: the answer in words, what is wrong, then the figures behind both."""

from __future__ import annotations

from kp_dynamo.aot.calibration import POINTS, error_range
from kp_dynamo.aot.figures import DISCLAIMER, AotFigures
from kp_dynamo.aot.page_memory import memory_section
from kp_dynamo.aot.page_modules import modules_section, what_limits
from kp_dynamo.aot.page_problems import problems_of
from kp_dynamo.aot.page_sections import (
    links_section,
    operations_section,
    programs_section,
    roofline_section,
)
from kp_dynamo.aot.report_text import text_of
from kp_dynamo.aot.slice_text import where_text
from kp_dynamo.explanation.page_content import layers_sentence, versions_parts
from kp_dynamo.explanation.page_passes import passes_section
from kp_dynamo.explanation.page_stages import stages_section
from kp_dynamo.hardware import CHIPS, DEVICES
from kp_dynamo.page.content import Figure, Lines, Page, Section, Table, Verbatim
from kp_dynamo.page.units import part_text, short_price, size_text, time_text


def page_of(report: AotFigures, verbose: bool = False, date: str = "") -> Page:
    """The page of a report; `verbose` as in its text."""
    return Page(
        title=f"kp_tpu: {_step(report).lower()} on {where_text(report)}",
        headline=_headline(report),
        figures=_figures(report),
        problems=tuple(problems_of(report)),
        sections=(
            programs_section(report),
            modules_section(report),
            memory_section(report),
            operations_section(report, verbose),
            roofline_section(report),
            links_section(report),
            passes_section(report.pass_reports, verbose) if report.pass_reports else _old_passes(report),
            stages_section(report.seconds),
            Section("versions", "Versions and options", (*versions_parts(report.versions), *_options(report))),
            _trust(),
            Section("text", "The same as text", (Verbatim("as the terminal shows it", text_of(report, verbose)),)),
        ),
        note=f"{DISCLAIMER} {_OPTIMIZER}" if report.train else DISCLAIMER,
        lead=what_limits(report),
        about=report.subject.facts(date),
    )


_OPTIMIZER = "The optimizer is in no figure: AdamW's state takes twice the memory of the parameters."


def _step(report: AotFigures) -> str:
    return "A training step" if report.train else "Inference"


def _headline(report: AotFigures) -> str:
    """ "A training step takes 13.3 ms on one v5e, 52% of its peak; 1.9 of 13.4 GiB; USD 2.16 a billion tokens."."""
    one = CHIPS[report.target].device_text()
    where = one if report.slice is None else f"{report.num_chips} {report.target}"
    takes = f"{_step(report)} takes {time_text(report.step_ms)} on {where}, {report.mfu:.0%} of its peak"
    memory = part_text(report.step_peak_bytes, report.memory_budget_bytes)
    held = memory if report.fits else f"it does NOT fit: {memory}"
    layers = layers_sentence([(block.layers, block.runs) for block in report.blocks], train=report.train)
    return f"{takes}; {held}; {_price(report)}. {layers}".strip()


def _price(report: AotFigures) -> str:
    tokens = report.usd_per_million_tokens
    return short_price(report.usd_per_million_steps, "steps") if tokens is None else short_price(tokens, "tokens")


def _figures(report: AotFigures) -> tuple[Figure, ...]:
    device, word = DEVICES[report.target], CHIPS[report.target].device_word
    memory = report.step_peak_bytes / report.memory_budget_bytes if report.memory_budget_bytes else None
    hour = f"{report.usd_per_hour:.2f} USD an hour"
    least = max(report.flops_floor_ms, report.bytes_floor_ms)
    tokens = () if report.tokens_per_s is None else (Figure("Tokens a second", f"{report.tokens_per_s:,.0f}"),)
    return (
        Figure("Time of a step", time_text(report.step_ms), f"at least {time_text(least)}{_by_cycles(report)}"),
        Figure(
            f"Of the {word}'s peak",
            f"{report.mfu:.0%}",
            f"of {device.bf16_flops / 1e12:.0f} TFLOP/s{_recomputing(report)}",
            report.mfu,
        ),
        Figure("Peak memory", size_text(report.step_peak_bytes), f"of {size_text(report.memory_budget_bytes)}", memory),
        *tokens,
        Figure("Price", _price(report).partition(" a ")[0], f"a {_price(report).partition(' a ')[2]}, at {hour}"),
        Figure("Compiling for the TPU", time_text(report.tpu_compile_s * 1e3), "of CPU time"),
    )


def _recomputing(report: AotFigures) -> str:
    return f"; {report.hfu:.0%} with recomputed matmuls" if report.recomputed_flops else ""


def _by_cycles(report: AotFigures) -> str:
    """The other estimate, which counts what the model knows nothing of."""
    return f"; {time_text(report.estimated_ms)} by the compiler's cycles" if report.estimated_ms else ""


def _options(report: AotFigures) -> tuple[Table, ...]:
    rows = {**report.options, "backend": report.backend, "precision of float32 matmuls": report.matmul_precision}
    if report.libtpu_flags:
        rows["flags of libtpu"] = report.libtpu_flags
    return (Table(("option", "value"), tuple((str(k), str(v)) for k, v in rows.items()), num_left=2),)


def _old_passes(report: AotFigures) -> Section:
    return Section("passes", "Passes", (Lines(report.passes, listed=True),) if report.passes else ())


def _trust() -> Section:
    least, most = error_range()
    lines = (
        "No chip ran this program. A TPU's compiler compiled it, and reports its memory and the cycles of operations.",
        "Memory is what the compiler allocated.",
        "Times are modelled: matmuls by the compiler's cycles, custom calls by their FLOPs or bytes, the rest by its "
        "bytes. Dispatch from the host and waiting for input are not in them.",
        "The compiler's cycles were compared with published times of a v5e, and of no other chip. "
        f"Matmuls: {least:.2f} to {most:.2f} of the measured time. Elementwise operations and gathers: the cycles are "
        "wrong or missing, so "
        "their time is their bytes or rows at the measured rate. Attention and convolutions were not compared by "
        "themselves; docs/planner.md compares whole training steps with published runs. Use the times as ratios "
        "between two programs.",
        "In the repository, python -m bench.calibration compiles these matmuls again and prints the ratios; "
        "docs/aot.md explains the rest.",
    )
    rows = tuple((p.what, p.measured, p.compiler_over_measured) for p in POINTS)
    sources = tuple((f"source: {p.source}",) for p in POINTS)
    table = Table(("what was measured", "measured", "compiler over measured"), rows, num_left=3, details=sources)
    return Section("trust", "How far to trust it", (Lines(lines, listed=True), table))
