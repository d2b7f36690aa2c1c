"""Makes the rows of a plan from bounds and from what the compiler found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kp_dynamo.aot.report import AotReport
from kp_dynamo.hardware import CHIPS, GB
from kp_dynamo.planner.candidates import Candidate
from kp_dynamo.planner.plan_figures import Kind, PlanRow
from kp_dynamo.planner.request import PlanRequest
from kp_dynamo.planner.search import Bounded, usd_per_second

_PARTS = {
    "matmuls": "its matmuls",
    "traffic": "its memory traffic",
    "gathers": "its gathers of weights",
    "gradient_sums": "its sums of gradients",
    "result_sums": "its sums of results",
    "optimizer": "its optimizer step",
}


@dataclass(frozen=True)
class Outcome:
    """What the compiler made of a candidate: a report, or a problem."""

    report: AotReport | None = None
    problem: str = ""
    is_too_large: bool = False
    """Whether the problem is the memory, so that a larger batch has it too."""


@dataclass(frozen=True)
class Figures:
    """Memory of a chip and time of a step: compiled ones if there are, else bounds."""

    bounded: Bounded
    kind: Kind
    memory_bytes: int
    step_s: float
    problem: str = ""
    is_too_large: bool = False
    peak_bytes: int = 0
    """Of the compiled programs with the optimizer's state, also if they do not fit; 0 if they were not compiled."""

    @property
    def candidate(self) -> Candidate:
        return self.bounded.candidate

    def value(self, objective: str) -> float:
        """What the objective minimizes."""
        price = usd_per_second(self.candidate.layout.topology) if objective == "cost" else 1.0
        return self.step_s / self.candidate.step_samples * price


def figures_of(bounded: Bounded, outcome: Outcome | None, request: PlanRequest) -> Figures:
    """The figures of a candidate; the compiler does not see the optimizer, whose memory and time are added."""
    if outcome is None or outcome.report is None:
        kind: Kind = "bound" if outcome is None else "failed"
        problem, is_too_large = ("", False) if outcome is None else (outcome.problem, outcome.is_too_large)
        return Figures(bounded, kind, bounded.memory.total, bounded.time.total, problem, is_too_large)
    report, memory = outcome.report, bounded.memory
    peak = report.step_peak_bytes + memory.unread + memory.optimizer + (memory.gradients if memory.is_added else 0)
    seconds = report.step_ms / 1e3 * bounded.candidate.accumulate + bounded.time.optimizer
    budget = request.budgets[bounded.candidate.layout.topology.target]
    if peak > budget:
        each = CHIPS[bounded.candidate.layout.topology.target].device_word
        problem = f"does not fit: {peak / GB:.2f} GB a {each}, compiled and with the optimizer's state"
        return Figures(bounded, "failed", bounded.memory.total, bounded.time.total, problem, True, peak)
    per_sample = seconds / bounded.candidate.step_samples
    if request.is_late(per_sample):
        problem = f"misses the deadline: {request.hours(per_sample):.3g} hours, compiled"
        return Figures(bounded, "late", peak, seconds, problem, peak_bytes=peak)
    return Figures(bounded, "compiled", peak, seconds, peak_bytes=peak)


def in_order(figures: Iterable[Figures], objective: str) -> list[Figures]:
    """Compiled ones first, then bounds, then late and failed ones; each the best first."""
    kinds = ("compiled", "bound", "late", "failed")

    def key(found: Figures) -> tuple[Any, ...]:
        # The rank of bounds compares them, also of those that failed.
        value = found.value(objective) if found.kind in ("compiled", "late") else 0.0
        return kinds.index(found.kind), value, found.bounded.rank(objective)

    return sorted(figures, key=key)


@dataclass(frozen=True)
class RowMaker:
    """Makes rows.

    Attributes:
        request: What was asked for.
        useful_flops: FLOPs of a sample without recomputation.
        first: The winner, which other rows are compared with.
    """

    request: PlanRequest
    useful_flops: int
    first: Figures

    def row(self, figures: Figures) -> PlanRow:
        """The row of a candidate."""
        bounded, candidate = figures.bounded, figures.candidate
        topology, tokens = candidate.layout.topology, self.request.samples.tokens
        chip, step_samples = CHIPS[topology.target], candidate.step_samples
        peak_flops = chip.bf16_flops * topology.num_chips
        usd_per_sample = figures.step_s / step_samples * usd_per_second(topology)
        hours, usd = self._total(figures)
        return PlanRow(
            kind=figures.kind,
            target=topology.target,
            topology=str(topology),
            num_chips=topology.num_chips,
            num_hosts=topology.num_hosts,
            mesh=candidate.layout.axes,
            sharding=candidate.layout.sharding,
            batch=candidate.batch,
            accumulate=candidate.accumulate,
            step_samples=step_samples,
            step_tokens=step_samples * tokens,
            checkpoint=candidate.checkpoint,
            memory_bytes=figures.memory_bytes,
            budget_bytes=self.request.budgets[topology.target],
            memory_parts=bounded.memory.parts,
            step_ms=figures.step_s * 1e3,
            time_parts_ms={name: seconds * 1e3 for name, seconds in bounded.time.parts.items()},
            mfu=self.useful_flops * step_samples / figures.step_s / peak_flops if figures.step_s else 0.0,
            usd_per_million=usd_per_sample * 1e6 / max(1, tokens),
            hours=hours,
            usd=usd,
            why=self._why(figures),
        )

    def _total(self, figures: Figures) -> tuple[float | None, float | None]:
        """Hours and price of the whole training."""
        hours = self.request.hours(figures.step_s / figures.candidate.step_samples)
        if hours is None:
            return None, None
        return hours, hours * 3600 * usd_per_second(figures.candidate.layout.topology)

    def _why(self, figures: Figures) -> str:
        objective, what = self.request.goal.objective, self.request.goal.objective
        if figures is self.first:
            in_time = "" if self.request.goal.deadline_hours is None else " in time"
            return (
                "the winner"
                if figures.kind == "compiled"
                else f"the best bound; nothing was compiled that fits{in_time}"
            )
        if figures.problem:
            return figures.problem
        least = self.first.value(objective)
        ratio = figures.value(objective) / least if least else 1.0
        if figures.kind == "compiled":
            return f"{ratio:.2f}x the {what} of the first, compiled{self._mostly(figures)}"
        if self.first.kind == "compiled" and ratio < 1:
            more = self._exposed(figures, least)
            told = f", or {more:.2f}x if nothing overlaps with its sums" if more > ratio + 0.005 else ""
            return f"not compiled: its {what} is at least {ratio:.2f}x that of the first{told}, so it may be better"
        if ratio < 0.995:
            more = self._exposed(figures, self.first.bounded.value_with_exposed_sums(objective))
            return f"at least {ratio:.2f}x the {what} of the first, but {more:.2f}x if nothing overlaps with sums"
        if ratio < 1.005:
            return f"the same bound as the first{self._more_without_overlap(figures)}"
        return f"at least {ratio:.2f}x the {what} of the first{self._mostly(figures)}"

    def _exposed(self, figures: Figures, least: float) -> float:
        more = figures.bounded.value_with_exposed_sums(self.request.goal.objective)
        return more / least if least else 1.0

    def _mostly(self, figures: Figures) -> str:
        """The part of the bounds in which a candidate exceeds the first one most."""
        more = self._differences(figures)
        name = max(more, key=more.__getitem__)
        return f", mostly by {_PARTS[name]}" if more[name] > 0 else ""

    def _more_without_overlap(self, figures: Figures) -> str:
        more = self._differences(figures)
        name = max(more, key=more.__getitem__)
        return f", but {_PARTS[name]} can hide less" if more[name] > 0 else ""

    def _differences(self, figures: Figures) -> Mapping[str, float]:
        objective = self.request.goal.objective
        mine, firsts = _per_sample(figures.bounded, objective), _per_sample(self.first.bounded, objective)
        return {name: mine[name] - firsts[name] for name in _PARTS}


def _per_sample(bounded: Bounded, objective: str) -> dict[str, float]:
    price = usd_per_second(bounded.candidate.layout.topology) if objective == "cost" else 1.0
    return {name: s / bounded.candidate.step_samples * price for name, s in bounded.time.parts.items()}
