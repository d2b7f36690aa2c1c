"""A plan as a page: the way to take in words, what is uncertain about it, and what was compared with it."""

from __future__ import annotations

from collections.abc import Iterator

from kp_dynamo.aot.calibration import error_range
from kp_dynamo.explanation.text_layout import counted, first_of
from kp_dynamo.hardware import CHIPS
from kp_dynamo.page.content import Cell, Figure, Lines, Page, Section, Table, Verbatim
from kp_dynamo.page.units import TimeUnit, part_text, size_text, time_text, unit_of_time
from kp_dynamo.planner.code_lines import code_of
from kp_dynamo.planner.page_pictures import memory_section, times_section
from kp_dynamo.planner.page_problems import chips_text, may_be_better, price_text, problems_of
from kp_dynamo.planner.plan_figures import PlanFigures, PlanRow
from kp_dynamo.planner.result_text import devices_note, mesh_text, text_of, why_text

_NUM_LISTED = 40
_TRUST = (
    "No chip ran any of these ways.",
    "Compiled rows hold what the TPU's compiler allocated, and the times that aot models from its cycles. The memory "
    "and the least time of the optimizer are added; the optimizer itself is not compiled.",
    "Other rows are bounds: their memory, time and price are at least that. Once compiled, such a way may not fit.",
    "Bounds hold no temporaries, no padding and no time of elementwise operators.",
    "The modelled time of matmuls is {:.2f} to {:.2f} of published times of a v5e; the page of aot lists what was "
    "measured, with its sources. docs/planner.md compares whole training steps on v5e, v6e and v5p with published "
    "runs.".format(*error_range()),
)


def page_of(plan: PlanFigures, date: str = "") -> Page:
    """The page of a plan."""
    first, kind = plan.winner, "training" if plan.train else "inference"
    return Page(
        title=f"kp_tpu: plan for {kind} on up to {plan.max_chips} chips of {', '.join(plan.targets)}",
        headline=_headline(plan),
        figures=tuple(_figures(plan)),
        problems=tuple(problems_of(plan)),
        sections=(
            _ways(plan),
            _code(plan),
            times_section(plan),
            memory_section(plan),
            Section("search", "The search", (Lines(tuple(_search(plan)), listed=True), *_left_out(plan))),
            Section("options", "Options", _options(plan)),
            Section("trust", "How far to trust it", (Lines(_TRUST, listed=True),)),
            Section("text", "The same as text", (Verbatim("as the terminal shows it", text_of(plan)),)),
        ),
        note="" if first.kind == "compiled" else "Memory, time and price are lower bounds.",
        lead=_what_takes_longest(first),
        about=plan.subject.facts(date),
    )


def _headline(plan: PlanFigures) -> str:
    row = plan.winner
    least, most = ("", "") if row.kind == "compiled" else ("at least ", "at most ")
    what = "Training" if plan.train else "Inference"
    best = "cheapest" if plan.objective == "cost" else "fastest"
    if row.kind == "compiled" and may_be_better(plan):
        is_best = f"The {best} compiled way of {what.lower()} is"
    else:
        is_best = f"{what} is {best}"
    lies = f", {row.sharding} on {mesh_text(row)}" if row.sharding else ""
    each = CHIPS[row.target].device_word
    told = (
        f"{is_best} on {chips_text(row)}{lies}, {counted(row.step_samples, 'sample')} a step: "
        f"{least}{time_text(row.step_ms)} a step, {most}{row.mfu:.0%} of the peak; "
        f"{least}{part_text(row.memory_bytes, row.budget_bytes)} a {each}; {least}{price_text(row)}."
    )
    if row.hours is None:
        return told
    tokens = f" of {_count(plan.tokens)} tokens" if plan.tokens else ""
    took = f"{least}{_duration(row.hours)} and {least}USD {_usd(row.usd or 0.0)}"
    return f"{told} The whole training{tokens} takes {took}."


def _what_takes_longest(row: PlanRow) -> str:
    """What limits the step by its bounds, in a sentence."""
    named = {name.replace("_", " "): ms for name, ms in row.time_parts_ms.items()}
    parts = sorted(named.items(), key=lambda part: -part[1])
    if not parts:
        return ""
    (longest, ms), *others = parts
    told = ", ".join(f"{name} {time_text(least)}" for name, least in others if least)
    verb = "take" if longest.endswith("s") else "takes"
    return f"Of what a step takes at least, the {longest} {verb} longest: {time_text(ms)}{f'; {told}' if told else ''}."


def _duration(hours: float) -> str:
    if hours < 1:
        return time_text(hours * 3.6e6)
    return f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:.3g} hours"


def _count(number: float) -> str:
    """ "15 trillion", "2.5 million"."""
    sizes = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))
    size, name = next(((size, name) for size, name in sizes if number >= size), (1, ""))
    return f"{number / size:,.3g} {name}".rstrip()


def _usd(usd: float) -> str:
    return f"{usd:,.0f}" if usd >= 100 else f"{usd:.3g}"


def _figures(plan: PlanFigures) -> Iterator[Figure]:
    row = plan.winner
    least, most = _marks(row)
    amount, _, per = price_text(row).partition(" a ")
    memory = row.memory_bytes / row.budget_bytes if row.budget_bytes else None
    peak = CHIPS[row.target].bf16_flops * row.num_chips
    yield Figure("Chips", str(row.num_chips), f"{row.target} {row.topology}")
    yield Figure("Time of a step", f"{least}{time_text(row.step_ms)}")
    yield Figure("Of the peak", f"{most}{row.mfu:.0%}", f"of {peak / 1e12:,.0f} TFLOP/s", row.mfu)
    yield Figure(
        f"Memory of a {CHIPS[row.target].device_word}",
        f"{least}{size_text(row.memory_bytes)}",
        f"of {size_text(row.budget_bytes)}",
        memory,
    )
    yield Figure("Price", f"{least}{amount}", f"a {per}")
    if row.hours is not None:
        yield Figure("Whole training", f"{least}{_duration(row.hours)}", f"{least}USD {_usd(row.usd or 0.0)}")


def _marks(row: PlanRow) -> tuple[str, str]:
    """What marks a lower and an upper bound."""
    return ("", "") if row.is_compiled else (">= ", "<= ")


def _ways(plan: PlanFigures) -> Section:
    unit = unit_of_time(plan.winner.step_ms)
    per = "a million" if plan.winner.usd_per_million >= 10 else "a billion"  # as `short_price`
    rows = tuple(_cells(number, row, unit, plan.winner.usd_per_million) for number, row in enumerate(plan.rows, 1))
    details = tuple((_how(row), why_text(row)) for row in plan.rows)
    caption = (
        f"{unit.name}: a step. GiB: the memory of a chip. Peak: the share of the chips' bfloat16 peak. USD: of "
        f"{per} {'tokens' if plan.winner.step_tokens else 'samples'}. >= and <= mark bounds. {devices_note(plan)}"
    ).rstrip()
    return Section(
        "ways", "The best ways", (Table(("way", unit.name, "GiB", "peak", "USD"), rows, 1, details, caption),)
    )


def _cells(number: int, row: PlanRow, unit: TimeUnit, winner_per_million: float) -> tuple[Cell, ...]:
    least, most = _marks(row)
    return (
        f"{number}: {row.num_chips} {row.target} {row.topology}",
        f"{least}{row.step_ms * unit.per_ms:,.3g}",
        f"{least}{row.memory_bytes / 2**30:.3g}",
        f"{most}{row.mfu:.0%}",
        f"{least}{row.usd_per_million * (1 if winner_per_million >= 10 else 1e3):,.3g}",
    )


def _how(row: PlanRow) -> str:
    lies = f"{row.sharding} on {mesh_text(row)}, " if row.sharding else ""
    batch = f"{row.batch}" if row.accumulate == 1 else f"{row.batch}, {row.accumulate} of them a step"
    least, _ = _marks(row)
    total = "" if row.hours is None else f"; in all {least}{_duration(row.hours)}, {least}USD {_usd(row.usd or 0.0)}"
    return f"{row.kind}: {lies}a batch of {batch}, checkpoint {row.checkpoint}{total}"


def _code(plan: PlanFigures) -> Section:
    summary = "" if plan.winner.is_runnable else "The best way on one host:"
    code = code_of(plan)
    parts = (Verbatim("the lines that run it", code, is_open=True),) if code else ()
    return Section("code", "To run it", parts, summary)


def _search(plan: PlanFigures) -> Iterator[str]:
    yield f"{plan.num_searched:,} ways were bounded; {plan.num_without_memory:,} exceed the memory of a chip."
    if plan.deadline_hours is not None:
        yield f"{plan.num_too_late:,} others miss the deadline of {plan.deadline_hours:,g} hours."
    compiled = sum(row.is_compiled for row in plan.rows)
    yield f"{counted(compiled, 'way')} compiled by the TPU compiler."
    spent = ", ".join(f"{name} {time_text(value * 1e3)}" for name, value in plan.seconds.items())
    yield f"The search took: {spent}."


def _left_out(plan: PlanFigures) -> tuple[Lines, ...]:
    reasons = [f"Not searched: {what}, because {reason}" for what, reason in plan.left_out.items()]
    return (Lines(tuple(first_of(reasons, _NUM_LISTED)), listed=True),) if reasons else ()


def _options(plan: PlanFigures) -> tuple[Table, ...]:
    rows = tuple((str(name), str(value)) for name, value in plan.options.items())
    return (Table(("option", "value"), rows, num_left=2),) if rows else ()
