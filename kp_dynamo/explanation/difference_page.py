"""The comparison of two explanations as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kp_dynamo.explanation.difference import Change, ExplanationDifference
from kp_dynamo.explanation.subject import sides_of
from kp_dynamo.explanation.text_layout import counted
from kp_dynamo.page.content import Figure, Lines, Page, Problem, Section, Table, Verbatim
from kp_dynamo.page.render import html_of

_TRUST = (
    "Both sides are what explain recorded in one run of the model each.",
    "Misses and programs depend on what was cached before: compare explanations of fresh processes.",
    "Seconds depend on the machine and its load, and are not judged.",
    "Problems are told apart by file, function and source, not by the number of the line.",
)


def difference_html(found: ExplanationDifference, date: str = "") -> str:
    """A comparison as one page, without scripts or a network; `date` is shown, such as "2026-03-01"."""
    return html_of(_page(found, date))


def _page(found: ExplanationDifference, date: str) -> Page:
    changed = [c for c in found.changes if c.before != c.after and c.is_judged]
    return Page(
        title="kp_tpu: two explanations of a model",
        headline=found.verdict,
        figures=tuple(Figure(c.figure.capitalize(), c.shown(c.after), f"was {c.shown(c.before)}") for c in changed[:6]),
        problems=tuple(_problems(found)),
        sections=(
            Section("figures", "All figures", (_table(found.changes),)),
            Section("passes", "Passes that rewrote more or less", (_table(found.passes),) if found.passes else ()),
            Section("gone", "No longer wrong", (Lines(found.gone, listed=True),) if found.gone else ()),
            Section("versions", "Versions that differ", _versions(found)),
            Section("trust", "How far to trust it", (Lines(_TRUST, listed=True),)),
            Section("text", "The same as text", (Verbatim("as the terminal shows it", found.text()),)),
        ),
        note=f"A figure is worse if it grew by more than {found.tolerance:.3g} of what it was.",
        about=sides_of(found.sides, date),
    )


def _problems(found: ExplanationDifference) -> Iterator[Problem]:
    for line in found.new:
        yield Problem("slow", f"New: {line}", cure="explain SPEC --html FILE names the line and what to do.")
    if found.worse:
        grown = "\n".join(map(str, found.worse))
        yield Problem("slow", f"{counted(len(found.worse), 'figure')} grew.", details=grown)


def _table(changes: Sequence[Change]) -> Table:
    rows = tuple((c.figure, c.shown(c.before), c.shown(c.after), _ratio(c)) for c in changes)
    return Table(("", "before", "after", "ratio"), rows)


def _ratio(change: Change) -> str:
    if change.before == change.after:
        return "-"
    return f"{change.after / change.before:.2f}x" if change.before else "new"


def _versions(found: ExplanationDifference) -> tuple[Table, ...]:
    return (Table(("package", "before", "after"), found.versions, num_left=3),) if found.versions else ()
