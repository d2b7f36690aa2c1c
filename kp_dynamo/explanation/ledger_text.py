"""The numbers ledger as text: a row for each pass that changed a graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kp_dynamo.explanation.graph_reports import PassOnGraph
from kp_dynamo.explanation.text_layout import rows_with_details
from kp_dynamo.passes.base import PassErrors

UNCHANGED = "the graph is unchanged"
LEDGER_HEAD = ("graph", "pass", "vs before", "vs float64", "bound", "gradients", "vs float64", "bound")


def ledger_lines(passes: Sequence[PassOnGraph]) -> Iterator[str]:
    """The errors of results and gradients, each against the graph before the pass and float64, and the bound.

    No line without the option `ledger`.
    """
    if all(done.errors is None for done in passes):
        return
    measured = ledger_rows(passes)
    num_unchanged = sum(done.errors is not None and done.errors.reason == UNCHANGED for done in passes)
    yield f"numbers ledger: {len(measured) or 'none'}, and {num_unchanged} that left a graph unchanged"
    details = [tuple(filter(None, (detail,))) for _, detail in measured]
    yield from (f"  {x}" for x in rows_with_details([LEDGER_HEAD, *(row for row, _ in measured)], details, num_left=2))


def ledger_rows(passes: Sequence[PassOnGraph]) -> list[tuple[tuple[str, ...], str]]:
    """A row for each pass that changed a graph, with its remarks."""
    return [
        ((done.graph, done.name, *_cells(done.errors)), _detail(done.errors))
        for done in passes
        if done.errors is not None and done.errors.reason != UNCHANGED
    ]


def _cells(errors: PassErrors) -> Iterator[str]:
    for kind in ("results", "gradients"):
        yield from (_figure(getattr(of, kind)) for of in (errors.before, errors.exact, errors.bound))


def _figure(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}" if error else "0"


def _detail(errors: PassErrors) -> str:
    taken_back = "TAKEN BACK, the graph is compiled without it" if errors.is_taken_back else ""
    return "; ".join(filter(None, (taken_back, errors.reason)))
