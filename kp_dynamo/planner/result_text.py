"""A plan as text: the table, what the search left out, and the lines that run the winner."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.explanation.text_layout import counted, first_of, table
from kp_dynamo.hardware import CHIPS
from kp_dynamo.planner.code_lines import code_of
from kp_dynamo.planner.plan_figures import PlanFigures, PlanRow

NOT_RUNNABLE = "planned, not runnable by this version"
_GB = 1e9
_NUM_LISTED = 6


def text_of(plan: PlanFigures) -> str:
    """The plan for people; ">=" and "<=" mark bounds."""
    return "\n".join([*_head(plan), "", *_rows(plan), "", *_one_host(plan), *_left_out(plan), *_code(plan)]).rstrip()


def _head(plan: PlanFigures) -> Iterator[str]:
    first = plan.winner
    tokens = f", {first.step_tokens} tokens" if first.step_tokens else ""
    kind = "training" if plan.train else "inference"
    yield (
        f"plan for {kind}, lowest {plan.objective}: up to {plan.max_chips} chips of {', '.join(plan.targets)}; the "
        f"first row's step has {first.step_samples} samples{tokens}"
    )
    late = f", {plan.num_too_late} miss the deadline" if plan.deadline_hours is not None else ""
    yield f"{plan.num_searched} ways bounded: {plan.num_without_memory} exceed the memory of a chip{late}"
    compiled = sum(row.is_compiled for row in plan.rows)
    yield f"{counted(compiled, 'row')} compiled by the TPU compiler; >= and <= mark bounds. No chip ran any of them."


def _rows(plan: PlanFigures) -> Iterator[str]:
    per = "tokens" if plan.winner.step_tokens else "samples"
    has_total = plan.winner.hours is not None
    total = ("hours", "USD") if has_total else ()
    head = ("", "chips", "mesh", "sharding", "batch", "checkpoint", "", "GB a chip", "of", "step ms", "MFU")
    rows: list[tuple[str, ...]] = [(*head, f"USD/M {per}", *total)]
    rows += [_cells(number, row) for number, row in enumerate(plan.rows, 1)]
    yield from table(rows, 7)
    if note := devices_note(plan):
        yield note
    yield ""
    yield from (f"{number}: {why_text(row)}" for number, row in enumerate(plan.rows, 1))


def devices_note(plan: PlanFigures) -> str:
    """What differs in rows of a target whose chips are several devices; "" without one."""
    found = [name for name in plan.targets if CHIPS[name].num_devices > 1]
    if not found:
        return ""
    return f"A chip of {' and '.join(found)} is two devices: its mesh arranges them, and GB are those of one."


def _cells(number: int, row: PlanRow) -> tuple[str, ...]:
    least, most = ("", "") if row.is_compiled else (">= ", "<= ")
    batch = f"{row.batch}" if row.accumulate == 1 else f"{row.batch} x {row.accumulate}"
    total = () if row.hours is None else (f"{least}{_number(row.hours)}", f"{least}{_number(row.usd or 0.0)}")
    return (
        str(number), f"{row.num_chips} {row.target} {row.topology}", mesh_text(row) if row.sharding else "-",
        row.sharding or "-", batch, str(row.checkpoint), row.kind, f"{least}{row.memory_bytes / _GB:.2f}",
        f"{row.budget_bytes / _GB:.1f}", f"{least}{_number(row.step_ms)}", f"{most}{row.mfu:.0%}",
        f"{least}{_number(row.usd_per_million)}", *total,
    )  # fmt: skip


def mesh_text(row: PlanRow) -> str:
    """ "data=4,model=2"."""
    return ",".join(f"{name}={size}" for name, size in row.mesh.items())


def why_text(row: PlanRow) -> str:
    """What a row is, or why it is not the first, and whether it can be run."""
    return row.why if row.is_runnable else f"{row.why}; {NOT_RUNNABLE} ({row.num_hosts} hosts)"


def _number(value: float) -> str:
    """Three significant digits; large numbers without exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _one_host(plan: PlanFigures) -> Iterator[str]:
    if plan.winner.is_runnable:
        return
    if plan.one_host is None:
        yield f"The first row is {NOT_RUNNABLE}, and on one host the model does not fit{in_time(plan)}."
    else:
        cells = _cells(0, plan.one_host)[1:]
        yield f"The first row is {NOT_RUNNABLE}. The best way on one host:"
        yield "  " + ", ".join(cell for cell in cells[:6] if cell != "-")
        each = CHIPS[plan.one_host.target].device_word
        yield f"  {cells[6]} of {cells[7]} GB a {each}, step {cells[8]} ms, MFU {cells[9]}, USD {cells[10]} a million"
    yield ""


def in_time(plan: PlanFigures) -> str:
    """What a way must do beside fitting the memory, if there is a deadline."""
    return "" if plan.deadline_hours is None else " in time"


def _left_out(plan: PlanFigures) -> Iterator[str]:
    if plan.left_out:
        yield "not searched, because the model cannot be divided so:"
        reasons = [f"{what}: {reason}" for what, reason in plan.left_out.items()]
        yield from (f"  {line}" for line in first_of(reasons, _NUM_LISTED))
        yield ""


def _code(plan: PlanFigures) -> Iterator[str]:
    code = code_of(plan)
    if code:
        yield "to run it:" if plan.winner.is_runnable else "to run that:"
        yield from (f"  {line}".rstrip() for line in code.splitlines())
