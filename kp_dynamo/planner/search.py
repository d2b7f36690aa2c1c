"""The search: bounds of every candidate, those that cannot be, and the order in which the others are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kp_dynamo.aot.topologies import Topology
from kp_dynamo.hardware import CHIPS
from kp_dynamo.planner.bounds import MemoryBound, TimeBound, memory_bound, time_bound
from kp_dynamo.planner.candidates import Candidate, batches, layouts
from kp_dynamo.planner.fact_source import FactSource
from kp_dynamo.planner.request import PlanRequest


@dataclass(frozen=True)
class Bounded:
    """A candidate with its bounds."""

    candidate: Candidate
    memory: MemoryBound
    time: TimeBound

    @property
    def seconds_per_sample(self) -> float:
        return self.time.total / self.candidate.step_samples

    def value(self, objective: str) -> float:
        """What the objective minimizes, at least."""
        return self._per_sample(self.time.total, objective)

    def value_with_exposed_sums(self, objective: str) -> float:
        """The same if nothing overlaps with a sum."""
        return self._per_sample(self.time.with_exposed_sums, objective)

    def rank(self, objective: str) -> tuple[float, float, int, int]:
        """The order: by the bound in which nothing overlaps with a sum, then without any overlap, then fewer chips."""
        without_overlap = self._per_sample(self.time.without_overlap, objective)
        chips, batches = self.candidate.layout.topology.num_chips, self.candidate.accumulate
        return float(f"{self.value_with_exposed_sums(objective):.3g}"), float(f"{without_overlap:.4g}"), chips, batches

    def _per_sample(self, seconds: float, objective: str) -> float:
        price = usd_per_second(self.candidate.layout.topology) if objective == "cost" else 1.0
        return seconds / self.candidate.step_samples * price


def usd_per_second(topology: Topology) -> float:
    """The price of a slice."""
    return CHIPS[topology.target].usd_per_hour * topology.num_chips / 3600


@dataclass
class Found:
    """What a search found.

    Attributes:
        fitting: Candidates whose bounds fit memory and deadline, the best first.
        num_searched: All candidates.
        num_without_memory: Those whose memory bound exceeds the budget.
        num_too_late: Those that cannot meet the deadline.
        least: Of those without memory, the one that exceeds its budget least.
        fastest: Of those that are too late, the fastest.
    """

    fitting: list[Bounded] = field(default_factory=list)
    num_searched: int = 0
    num_without_memory: int = 0
    num_too_late: int = 0
    least: Bounded | None = None
    fastest: Bounded | None = None


def search(request: PlanRequest, source: FactSource, topologies: Iterable[Topology]) -> Found:
    """Bounds for every candidate on these slices."""
    found = Found()
    for topology in topologies:
        for bounded in _bounded(request, source, topology):
            _sort_in(found, bounded, request)
    found.fitting.sort(key=lambda b: b.rank(request.goal.objective))
    return found


def _bounded(request: PlanRequest, source: FactSource, topology: Topology) -> Iterator[Bounded]:
    for layout in layouts(topology, with_tensor=True):
        for mode in source.captures:
            facts = source.facts(layout, mode)
            if facts is None:
                continue
            for samples, accumulate in batches(layout.data, request.step_samples):
                candidate = Candidate(layout, samples, accumulate, mode)
                yield Bounded(candidate, memory_bound(candidate, facts), time_bound(candidate, facts))


def _sort_in(found: Found, bounded: Bounded, request: PlanRequest) -> None:
    found.num_searched += 1
    over, seconds = _over(bounded, request), bounded.seconds_per_sample
    if over > 1:
        found.num_without_memory += 1
        if found.least is None or over < _over(found.least, request):
            found.least = bounded
    elif request.is_late(seconds):
        found.num_too_late += 1
        if found.fastest is None or seconds < found.fastest.seconds_per_sample:
            found.fastest = bounded
    else:
        found.fitting.append(bounded)


def _over(bounded: Bounded, request: PlanRequest) -> float:
    return bounded.memory.total / request.budgets[bounded.candidate.layout.topology.target]


def best_of_each(fitting: Iterable[Bounded], objective: str, has_room: Callable[[Bounded], bool]) -> list[Bounded]:
    """The best candidate of each slice and sharding, in order; one that has room for temporaries comes first."""
    chosen: dict[Any, Bounded] = {}
    for bounded in fitting:
        key = group_of(bounded.candidate)
        if key not in chosen or (not has_room(chosen[key]) and has_room(bounded)):
            chosen[key] = bounded
    return sorted(chosen.values(), key=lambda b: b.rank(objective))


def group_of(candidate: Candidate) -> tuple[Topology, str]:
    """What a row of a plan stands for: mesh, batch and checkpoint mode are the best for it."""
    return candidate.layout.topology, candidate.layout.sharding
