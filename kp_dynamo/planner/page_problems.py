"""What is uncertain about a plan, or keeps its first way from running, for its page."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.explanation.text_layout import counted
from kp_dynamo.page.content import Problem
from kp_dynamo.page.units import short_price, time_text
from kp_dynamo.planner.plan_figures import PlanFigures, PlanRow
from kp_dynamo.planner.result_text import NOT_RUNNABLE, in_time


def problems_of(plan: PlanFigures) -> Iterator[Problem]:
    """All of them, the worst first."""
    row = plan.winner
    if not row.is_runnable:
        cure = f"on one host the model does not fit{in_time(plan)}."
        if (other := plan.one_host) is not None:
            least = "" if other.kind == "compiled" else "at least "
            takes = f"{least}{time_text(other.step_ms)} a step, {least}{price_text(other)}"
            cure = f"the best way on one host, {chips_text(other)}: {takes}."
        yield Problem("stop", f"The first way needs {row.num_hosts} hosts: {NOT_RUNNABLE}.", cure=cure)
    if row.kind == "failed":
        yield Problem(
            "stop", f"The compiler did not make the first way fit: {row.why}.", cure="more chips (--max-chips)."
        )
    elif row.kind == "bound":
        tried = any(way.is_compiled or way.kind == "failed" for way in plan.rows)
        what = f"No way that was compiled fits{in_time(plan)}" if tried else "No way was compiled"
        yield Problem("note", f"{what}: whether this one fits is unknown.", cure="plan SPEC --compile N compiles more.")
    yield from _others(plan)


def _others(plan: PlanFigures) -> Iterator[Problem]:
    others = list(enumerate(plan.rows[1:], 2))
    if failed := [f"{number}: {way.why}" for number, way in others if way.kind == "failed"]:
        yield Problem(
            "note", f"{counted(len(failed), 'way')} did not fit or did not compile.", details="\n".join(failed)
        )
    if late := [f"{number}: {way.why}" for number, way in others if way.kind == "late"]:
        yield Problem(
            "note", f"{counted(len(late), 'way')} missed the deadline once compiled.", details="\n".join(late)
        )
    if better := may_be_better(plan):
        what = f"Of the ways that were not compiled, {counted(len(better), 'way')} may be better: {', '.join(better)}."
        yield Problem("note", what, cure="plan SPEC --compile N compiles more of them.")


def may_be_better(plan: PlanFigures) -> list[str]:
    """The numbers of the ways whose bound is below what the first one, which is compiled, takes."""
    return [str(n) for n, way in enumerate(plan.rows, 1) if way.kind == "bound" and "may be better" in way.why]


def chips_text(row: PlanRow) -> str:
    """ "one v5e", "16 chips of v5e (4x4)"."""
    return f"one {row.target}" if row.num_chips == 1 else f"{row.num_chips} chips of {row.target} ({row.topology})"


def price_text(row: PlanRow) -> str:
    """ "USD 2.16 a billion tokens"."""
    return short_price(row.usd_per_million, "tokens" if row.step_tokens else "samples")
