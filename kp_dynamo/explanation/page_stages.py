"""Seconds of compiling by stage, as a section of a page: each with its clock."""

from __future__ import annotations

from kp_dynamo.page.content import Cell, Section, Share, Table
from kp_dynamo.page.units import time_text

_STAGES = {
    "dynamo": "Dynamo: Python to a graph",
    "aot": "AOTAutograd, partition and keys",
    "passes": "passes",
    "trace": "lowering: ATen to XLA",
    "xla": "XLA's compiler",
    "tpu": "the TPU's compiler",
    "rest": "waiting for the TPU's compiler, and the rest",
}
_CPU_STAGES = ("tpu",)  # several programs compile at the same time, in processes of their own


def stages_section(seconds: dict[str, float]) -> Section:
    """Seconds of compiling by stage, each with its clock; only times of the wall clock have shares of one sum."""
    stages = _with_rest(seconds)
    on_wall = {name: value for name, value in stages.items() if name not in _CPU_STAGES}
    whole = sum(on_wall.values())
    rows = tuple(
        (_STAGES.get(name, name), _clock(name), time_text(value * 1e3), _wall_share(name, value, whole))
        for name, value in stages.items()
    )
    all_of_it = time_text(seconds["total"] * 1e3) if "total" in seconds else ""
    total = f" From the call to the report: {all_of_it} of wall time." if all_of_it else ""
    longest = max(on_wall, key=lambda name: on_wall[name], default="")
    summary = f"Longest on the wall clock: {_STAGES.get(longest, longest)}.{total}" if longest else ""
    table = Table(("stage", "clock", "time", "share"), rows, num_left=2)
    return Section("seconds", "Seconds of compiling", (table,), summary)


def _with_rest(seconds: dict[str, float]) -> dict[str, float]:
    """The stages, and what of the total no stage of this process takes."""
    stages = {name: value for name, value in seconds.items() if name != "total"}
    own = sum(value for name, value in stages.items() if name not in _CPU_STAGES)
    rest = max(0.0, seconds.get("total", 0.0) - own)
    return {**stages, "rest": rest} if rest else stages


def _clock(stage: str) -> str:
    return "CPU, other processes" if stage in _CPU_STAGES else "wall, this process"


def _wall_share(stage: str, value: float, whole: float) -> Cell:
    return "-" if stage in _CPU_STAGES else Share(value / whole if whole else 0)
