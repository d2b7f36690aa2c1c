"""What is wrong with a step on a TPU, for its page: the worst first, each with what to do."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.aot.figures import AotFigures
from kp_dynamo.aot.report_text import which_to_believe
from kp_dynamo.explanation.page_problems import fallback_problems, refusal_problems
from kp_dynamo.explanation.text_layout import counted, first_of
from kp_dynamo.graph.places import short_line
from kp_dynamo.hardware import CHIPS
from kp_dynamo.page.content import Problem
from kp_dynamo.page.units import part_text, time_text

_LONG_WAIT = 0.2
_NUM_LISTED = 20
_SMALLER = "a smaller batch, or more chips (--chips); python -m kp_dynamo plan SPEC searches for what fits."
_SMALLER_STEP = f'options={{"checkpoint": "blocks"}}, which saves less for the backward; {_SMALLER}'


def problems_of(report: AotFigures) -> Iterator[Problem]:
    """All of them."""
    yield from _memory(report)
    yield from _graph_breaks(report)
    yield from _fallbacks(report)
    yield from _chips(report)
    yield from _estimates(report)
    yield from refusal_problems(report.pass_reports)


def _memory(report: AotFigures) -> Iterator[Problem]:
    if not report.fits:
        needs = part_text(report.step_peak_bytes, report.memory_budget_bytes)
        what = f"The step does not fit {CHIPS[report.target].device_text('a')}: its peak is {needs} that it may use."
        yield Problem("stop", what, cure=_SMALLER_STEP if report.train else _SMALLER)


def _graph_breaks(report: AotFigures) -> Iterator[Problem]:
    for line in report.graph_breaks:
        place, _, reason = short_line(line).partition(": ")
        cure = "rewrite the line without what Dynamo cannot trace; explain --html shows Dynamo's own hints."
        yield Problem("slow", f"Graph break: {reason or 'for an unknown reason'}", place, cure=cure)


def _fallbacks(report: AotFigures) -> Iterator[Problem]:
    if report.fallback_reports:
        yield from fallback_problems(report.fallback_reports, has_run=False)
        return
    for line in report.fallbacks:  # all that an earlier report has
        yield Problem("slow", f"{short_line(line)}: this operator would run on the CPU. Its time is in no figure here.")


def _chips(report: AotFigures) -> Iterator[Problem]:
    if report.slice is None:
        return
    device = CHIPS[report.target].device_word
    share = report.exposed_ms / report.step_ms if report.step_ms else 0.0
    if share > _LONG_WAIT:
        [longest, *_] = sorted(report.collectives, key=lambda row: -row.exposed_ms)
        what = f"Each {device} waits {time_text(report.exposed_ms)} of a step for its links, {share:.0%} of it."
        where = f"{longest.kind} along {longest.axes}: {time_text(longest.exposed_ms)}"
        yield Problem("slow", what, where, cure="another mesh or sharding, or a larger batch; docs/sharding.md.")
    if report.slice.whole:
        what = f"Whole on every {device}, and larger than 64 MiB: {counted(len(report.slice.whole), 'tensor')}."
        details = "\n".join(first_of(report.slice.whole, _NUM_LISTED))
        yield Problem("slow", what, cure="name an axis for it in the sharding; docs/sharding.md.", details=details)


def _estimates(report: AotFigures) -> Iterator[Problem]:
    if reason := which_to_believe(report):
        times = f"{time_text(report.modelled_ms)} modelled, {time_text(report.estimated_ms)} by the compiler's cycles"
        yield Problem("note", f"Two estimates of the time are far apart: {times}.", cure=f"{reason}.")
    if report.custom_call_ms:
        calls = sum(len(p.custom_calls) for p in report.programs)
        what = (
            f"{counted(calls, 'custom call')} without an estimate of the compiler: {time_text(report.custom_call_ms)} "
            "of the time is their least, by FLOPs or bytes."
        )
        yield Problem("note", what, cure="expect more than the page says; only a chip can tell.")
    if report.unknown:
        number = counted(len(report.unknown), "operation")
        what = f"{number} without the compiler's cycles: the modelled time counts their bytes instead."
        yield Problem("note", what, details="\n".join(first_of(report.unknown, _NUM_LISTED)))
