"""The pictures of a plan's page: time and memory of the ways, part by part."""

from __future__ import annotations

from kp_dynamo.page.content import Picture, Section
from kp_dynamo.page.pictures import parts_apart
from kp_dynamo.page.units import unit_of_size, unit_of_time
from kp_dynamo.planner.plan_figures import PlanFigures, PlanRow
from kp_dynamo.planner.result_text import devices_note


def times_section(plan: PlanFigures) -> Section:
    """The least time of each way, part by part."""
    unit = unit_of_time(max(max(row.time_parts_ms.values(), default=0.0) for row in plan.rows))
    rows = {_name(n, row): _scaled(row.time_parts_ms, unit.per_ms) for n, row in enumerate(plan.rows, 1)}
    drawn = parts_apart("times", "Least time of a step by part", rows, f"{unit.name}, at least")
    caption = (
        "What a step takes at least, part by part. Parts are not added up: all but the optimizer may overlap. "
        "Gathers and sums of gradients share links, so they do not overlap with each other."
    )
    return Section("times", "Why: time", (Picture(drawn, caption),))


def memory_section(plan: PlanFigures) -> Section:
    """The least memory of each way, part by part."""
    unit = unit_of_size(max(max(row.memory_parts.values(), default=0) for row in plan.rows))
    rows = {_name(n, row): _scaled(row.memory_parts, 1 / unit.num_bytes) for n, row in enumerate(plan.rows, 1)}
    drawn = parts_apart("memory", "Least memory of a chip by part", rows, f"{unit.name} a chip, at least")
    caption = (
        "What a chip holds at least, part by part. Parts are not added up: gradients and activations of a step of one "
        f"batch are not held together. {devices_note(plan)}"
    ).rstrip()
    return Section("memory", "Why: memory", (Picture(drawn, caption),))


def _name(number: int, row: PlanRow) -> str:
    return f"{number}: {row.num_chips} {row.target}"


def _scaled(parts: dict[str, float] | dict[str, int], factor: float) -> dict[str, float]:
    return {name.replace("_", " "): value * factor for name, value in parts.items()}
