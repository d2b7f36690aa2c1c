"""The search: bounds of every candidate, those that cannot be, and the order in which the others are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kp_dynamo.aot.step_graphs import StepGraphs
from kp_dynamo.aot.tensor_plan import MatmulPairs
from kp_dynamo.aot.topologies import Topology
from kp_dynamo.exceptions import TPUConfigurationError, XLACompilationError
from kp_dynamo.hardware import CHIPS
from kp_dynamo.planner.bounds import Facts, MemoryBound, TimeBound, memory_bound, time_bound
from kp_dynamo.planner.candidates import Candidate, Layout, batches, layouts
from kp_dynamo.planner.request import PlanRequest
from kp_dynamo.planner.step_facts import Activations, activations, flops_per_sample, parameter_reads
from kp_dynamo.planner.weights import Weights, weights_of
from kp_dynamo.sharding.rules import own_plan


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

    def value_with_sums(self, objective: str) -> float:
        """The same if nothing overlaps with a sum."""
        return self._per_sample(self.time.with_sums, objective)

    def rank(self, objective: str) -> tuple[float, float, int, int]:
        """The order: by the bound in which nothing overlaps with a sum, then without any overlap, then fewer chips."""
        in_turn = self._per_sample(self.time.in_turn, objective)
        chips, batches = self.candidate.layout.topology.num_chips, self.candidate.accumulate
        return float(f"{self.value_with_sums(objective):.3g}"), float(f"{in_turn:.4g}"), chips, batches

    def _per_sample(self, seconds: float, objective: str) -> float:
        price = usd_per_second(self.candidate.layout.topology) if objective == "cost" else 1.0
        return seconds / self.candidate.step_samples * price


def usd_per_second(topology: Topology) -> float:
    """The price of a slice."""
    return CHIPS[topology.target].usd_per_hour * topology.num_chips / 3600


@dataclass
class FactSource:
    """What the captures say about any candidate; each part is computed once.

    Attributes:
        captures: The graphs of a step for each checkpoint mode.
    """

    request: PlanRequest
    captures: Mapping[Any, StepGraphs]
    _refused: dict[str, dict[str, str]] = field(default_factory=dict)
    _found: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flops = {mode: flops_per_sample(capture) for mode, capture in self.captures.items()}
        self._pairs = MatmulPairs(self.request.model, self.request.args)
        self._reads = {mode: parameter_reads(capture) for mode, capture in self.captures.items()}

    @property
    def useful_flops(self) -> int:
        """FLOPs of a sample without recomputed ones; the modes differ only in what they recompute."""
        return min(flops.useful for flops in self._flops.values())

    @property
    def left_out(self) -> dict[str, str]:
        """For each sharding that is impossible on some meshes, on how many, and why on the first of them."""
        found = {}
        for sharding, reasons in self._refused.items():
            (mesh, reason), *others = reasons.items()
            found[f"{sharding} on {mesh}" + (f" and {len(others)} other meshes" if others else "")] = reason
        return found

    def facts(self, layout: Layout, mode: Any) -> Facts | None:
        """The facts of a layout; None if the model cannot be divided so."""
        try:
            weights = self._weights(layout, mode)
            live = self._activations(mode, layout.model)
        except TPUConfigurationError as problem:
            self._refused.setdefault(layout.sharding, {})[str(layout.mesh)] = str(problem)
            return None
        request = self.request
        return Facts(
            weights, live, self._least_flops(mode), request.samples.rows, request.samples.num_bytes,
            request.state_factor, request.train,
        )  # fmt: skip

    def _least_flops(self, mode: Any) -> int:
        """Of a step for one sample; the capture of "auto" recomputes all it can, and the compiled one may not."""
        flops = self._flops[mode]
        return flops.least if mode != "auto" else max(0, flops.least - flops.recomputed)

    def _weights(self, layout: Layout, mode: Any) -> Weights:
        word = layout.sharding or "data"
        found: Weights = self._once(
            ("weights", layout.data, layout.model, word, mode),
            lambda: weights_of(
                self.request.model, layout.mesh, word, self._reads[mode], self.request.train, self._plan(layout.model)
            ),
        )
        return found

    def _plan(self, model: int) -> Mapping[str, Any] | None:
        """How "tensor" divides a model that brings no plan; None if it brings one, or nothing divides its matmuls."""
        if model == 1 or own_plan(self.request.model):
            return None
        try:
            return self._pairs.plan(model)
        except XLACompilationError as problem:  # some models need more than the batch of one that shows the pairs
            raise TPUConfigurationError(str(problem)) from problem

    def _activations(self, mode: Any, model: int) -> Activations:
        key = ("activations", mode, model)
        found: Activations = self._once(key, lambda: activations(self.captures[mode], model, self._plan(model)))
        return found

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of `make()`, or the error that it raised the first time."""
        if key not in self._found:
            try:
                self._found[key] = make()
            except TPUConfigurationError as problem:
                self._found[key] = problem
        if isinstance(self._found[key], TPUConfigurationError):
            raise self._found[key]
        return self._found[key]


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
