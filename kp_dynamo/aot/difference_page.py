"""The comparison of two reports as a page."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.aot.difference import Comparison, Difference
from kp_dynamo.explanation.subject import sides_of
from kp_dynamo.explanation.text_layout import counted
from kp_dynamo.page.content import Figure, Lines, Page, Problem, Section, Table, Verbatim
from kp_dynamo.page.render import html_of
from kp_dynamo.page.units import size_text, time_text

_NAMES = {
    "step_ms": "Time of a step",
    "exposed_ms": "Waiting for links",
    "modelled_ms": "Modelled time",
    "estimated_ms": "Time by the compiler's cycles",
    "peak_bytes": "Peak memory",
    "bytes": "Bytes touched",
    "flops": "FLOPs",
}
_NUM_MODULES = 20
_LEAST_SHARE = 0.002  # of the step: smaller changes are the compiler's noise


def comparison_html(found: Comparison, date: str = "") -> str:
    """A comparison as one page, without scripts or a network; `date` is shown, such as "2026-03-01"."""
    return html_of(_page(found, date))


def _page(found: Comparison, date: str) -> Page:
    grown = [f"{_NAMES[d.figure].lower()} {_ratio(d)}" for d in found.differences if d.figure in found.worse]
    grown += [f"{len(found.new)} new: {found.new[0]}"] if found.new else []
    headline = f"Worse: {'; '.join(grown)}." if grown else "Nothing is worse."
    return Page(
        title="kp_tpu: two reports of a step",
        headline=headline,
        figures=tuple(
            Figure(_NAMES[d.figure], _value(d, d.after), f"was {_value(d, d.before)}, {_ratio(d)}")
            for d in found.differences
        ),
        problems=tuple(_problems(found)),
        sections=(
            Section("remarks", "What was changed", (Lines(found.remarks, listed=True),) if found.remarks else ()),
            Section("modules", "Modules whose time changed most", _modules(found)),
            Section("text", "The same as text", (Verbatim("as the terminal shows it", str(found)),)),
        ),
        note=f"A figure is worse if it is more than {found.threshold:g} times what it was. No chip ran either step.",
        about=sides_of(found.sides, date),
    )


def _problems(found: Comparison) -> Iterator[Problem]:
    for line in found.new:
        yield Problem("slow", f"New: {line}", cure="aot SPEC --html FILE names the line and what to do.")
    worse = [d for d in found.differences if d.figure in found.worse]
    grown = [f"{_NAMES[d.figure]}: {_value(d, d.before)} -> {_value(d, d.after)}" for d in worse]
    if grown:
        yield Problem("slow", f"{counted(len(grown), 'figure')} grew.", details="\n".join(grown))


def _modules(found: Comparison) -> tuple[Table, ...]:
    whole = sum(max(d.before, d.after) for d in found.modules)
    changed = [d for d in found.modules if abs(d.after - d.before) > _LEAST_SHARE * whole]
    changed.sort(key=lambda d: -abs(d.after - d.before))
    rows = tuple((d.figure, time_text(d.before), time_text(d.after), _ratio(d)) for d in changed[:_NUM_MODULES])
    more = len(changed) - _NUM_MODULES
    caption = (
        "Modelled time of a step in a module's own operators, all its runs together. A fusion counts for the modules "
        "of its matmuls: if the compiler fuses another operator there, its time moves to them."
    )
    caption += f" {counted(more, 'module')} more changed." if more > 0 else ""
    return (Table(("module", "before", "after", "ratio"), rows, caption=caption),) if rows else ()


def _value(difference: Difference, value: float) -> str:
    if difference.figure.endswith("_ms"):
        return time_text(value)
    return size_text(value) if difference.figure.endswith("bytes") else f"{value / 1e9:,.3g} GFLOP"


def _ratio(difference: Difference) -> str:
    return f"{difference.ratio:.3f}x" if difference.before else ("new" if difference.after else "-")
