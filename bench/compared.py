"""A model compiled by a v5e's compiler, through kp_tpu or through stock openxla: the figures of a row, and ratios.

No time here is measured on a chip: cycles are the compiler's; modelled milliseconds use the cycles of matmul fusions
and the bytes of everything else (docs/aot.md). A figure and its ratio come from the same run.
"""

from __future__ import annotations

from typing import Any

import kp_dynamo
from bench.workloads import Workload
from kp_dynamo.exceptions import XLACompilationError

OPENXLA = "openxla"
COMPARED = ("cycles ms", "modelled ms", "peak MiB")
FIGURES = (
    *COMPARED, "over the floors", "GB touched", "TPU compile s", "our s", "unknown", "programs",
    "roofline of calls ms",
)  # fmt: skip


def figures(made: Workload, train: bool, variant: str, options: dict[str, Any]) -> dict[str, Any]:
    """What the compiler makes of a model through openxla, or through kp_tpu with `options`."""
    how: dict[str, Any] = {"backend": OPENXLA} if variant == OPENXLA else {"options": options}
    try:
        found = kp_dynamo.aot_compile(made.model, made.inputs, target="v5e", train=train, **how)
    except XLACompilationError as error:  # libtpu's own failures are a result as well
        return {**dict.fromkeys(FIGURES), "failed": str(error).splitlines()[0][:200]}
    return {
        "cycles ms": found.estimated_ms,
        "modelled ms": found.modelled_ms,
        "over the floors": found.over_floor,
        "peak MiB": found.peak_bytes / 2**20,
        "GB touched": found.bytes / 1e9,
        "TPU compile s": found.tpu_compile_s,
        "our s": sum(found.seconds[stage] for stage in ("dynamo", "aot", "passes", "trace")),
        "unknown": len(found.unknown),
        "programs": len(found.programs),
        "roofline of calls ms": found.custom_call_ms,
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one case, openxla's first, with their ratios to it."""
    return [{**row, **{f"{name} ratio": _ratio(row[name], rows[0][name]) for name in COMPARED}} for row in rows]


def _ratio(figure: float | None, base: float | None) -> float | None:
    return None if figure is None or base is None else figure / base
