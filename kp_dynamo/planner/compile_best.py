"""Compiles the best candidates for real, one after the other, each with the worker processes of `aot_compile`.

A candidate that does not fit rules out those that differ only by a larger batch, and one that misses the deadline those
of its slice and sharding that would miss it too. What a compiled one needs beyond its
bound and its largest whole weight, for each sample, is expected of the others with its checkpoint mode and its axis
"model". Results are kept as files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.aot.resized_inputs import resized
from kp_dynamo.exceptions import TPUOutOfMemoryError, XLACompilationError
from kp_dynamo.planner.candidates import Candidate
from kp_dynamo.planner.request import PlanRequest
from kp_dynamo.planner.rows import Figures, Outcome, figures_of
from kp_dynamo.planner.search import Bounded, Found, best_of_each, group_of
from kp_dynamo.planner.stored import StoredOutcomes

ROOM = 0.8
"""A bound of up to this share of the memory budget, with the largest whole weight, leaves room for temporaries."""
_EXPECTED_ROOM = 0.95
"""The same where a way of the same kind was compiled, and its temporaries are known."""
_MORE_TRIES = 3
"""How many candidates more than asked for are compiled if some do not fit."""


@dataclass
class BestCompiler:
    """Compiles the best candidates of a search.

    Attributes:
        request: What is planned.
        found: The candidates.
        stored: The results of earlier runs.
        is_shown: Whether a progress bar names what is compiled.
        figures: What was compiled so far, those that failed too.
    """

    request: PlanRequest
    found: Found
    stored: StoredOutcomes
    is_shown: bool
    figures: dict[Candidate, Figures] = field(default_factory=dict)

    def compile(self, number: int) -> None:
        """Compile until this many candidates fit; the last one is of one host if none of the others is.

        Raises:
            TPUNotAvailableError: The TPU compiler is not installed.
        """
        with tqdm(total=number, disable=not (self.is_shown and number), unit="compile") as bar:
            while (missing := number - self._num_compiled()) > 0 and len(self.figures) < number + _MORE_TRIES:
                one_host = missing == 1 and not any(self._on_one_host(f.candidate) for f in self._compiled())
                bounded = (self._next(self._on_one_host) if one_host else None) or self._next(lambda _: True)
                if bounded is None:
                    break
                bar.set_description_str(described(bounded.candidate))
                self.figures[bounded.candidate] = self._compile(bounded)
                bar.update(self._num_compiled() - bar.n)

    def tried_and_left(self) -> list[Figures]:
        """What was compiled, and for each other slice and sharding the best that is left."""
        done = {group_of(f.candidate) for f in self._compiled()}
        left = [b for b in self.found.fitting if group_of(b.candidate) not in done and not self._is_ruled_out(b)]
        best = best_of_each(left, self.request.goal.objective, self._has_room)
        bounds = (figures_of(b, None, self.request) for b in best)
        return [*self.figures.values(), *bounds]

    def _compiled(self) -> list[Figures]:
        return [f for f in self.figures.values() if f.kind == "compiled"]

    def _num_compiled(self) -> int:
        return len(self._compiled())

    def _on_one_host(self, candidate: Candidate) -> bool:
        return candidate.layout.is_runnable

    def _next(self, is_wanted: Callable[[Candidate], bool]) -> Bounded | None:
        """The best candidate that was not tried, of slices and shardings without a compiled one.

        Any with room for temporaries comes before all others, whose minutes in the compiler often end in a refusal. So
        do other slices and shardings than those of which the compiler refused a program whatever its memory.
        """
        done = {group_of(f.candidate) for f in self._compiled()}
        left = [b for b in self.found.fitting if group_of(b.candidate) not in done and not self._is_ruled_out(b)]
        wanted = [b for b in left if is_wanted(b.candidate)]
        best = best_of_each(wanted, self.request.goal.objective, self._has_room)
        failed = (f for f in self.figures.values() if f.kind == "failed" and not f.is_too_large)
        refused = {group_of(f.candidate) for f in failed}
        return min(best, key=lambda b: (group_of(b.candidate) in refused, not self._has_room(b)), default=None)

    def _has_room(self, bounded: Bounded) -> bool:
        """Whether a candidate is expected to fit, with its temporaries."""
        memory, samples = bounded.memory, bounded.candidate.samples
        budget = self.request.budgets[bounded.candidate.layout.topology.target]
        found = [
            (f.peak_bytes - f.bounded.memory.with_whole) / f.candidate.samples
            for f in self.figures.values()
            if f.peak_bytes and _kind(f.candidate) == _kind(bounded.candidate)
        ]
        if not found:
            return memory.with_whole <= ROOM * budget
        return memory.with_whole + max(0.0, *found) * samples <= _EXPECTED_ROOM * budget

    def _is_ruled_out(self, bounded: Bounded) -> bool:
        candidate = bounded.candidate
        too_large = (f.candidate for f in self.figures.values() if f.is_too_large)
        return (
            candidate in self.figures
            or any(
                f.layout == candidate.layout and f.checkpoint == candidate.checkpoint and f.samples <= candidate.samples
                for f in too_large
            )
            or any(self._is_late_too(bounded, f) for f in self.figures.values() if f.kind == "late")
        )

    def _is_late_too(self, bounded: Bounded, late: Figures) -> bool:
        """Whether a candidate of the same slice and sharding misses the deadline if it exceeds its bound as much."""
        if group_of(bounded.candidate) != group_of(late.candidate):
            return False
        return self.request.is_late(bounded.seconds_per_sample * late.step_s / late.bounded.time.total)

    def _compile(self, bounded: Bounded) -> Figures:
        outcome = self.stored.read(bounded.candidate)
        if outcome is None:
            outcome, is_kept = _outcome(bounded.candidate, self.request)
            if is_kept:
                self.stored.write(bounded.candidate, outcome)
        return figures_of(bounded, outcome, self.request)


def _kind(candidate: Candidate) -> tuple[str, int]:
    """Candidates of a kind have equal programs, but for the batch and the number of chips."""
    return candidate.checkpoint, candidate.layout.model


def _outcome(candidate: Candidate, request: PlanRequest) -> tuple[Outcome, bool]:
    """What the compiler makes of a candidate, and whether it would do so again."""
    layout = candidate.layout
    slice_of: dict[str, Any] = {}
    if layout.sharding:
        slice_of = {"chips": str(layout.topology), "mesh": layout.axes, "sharding": layout.sharding}
    try:
        report = aot_compile(
            request.model,
            resized(request.args, candidate.batch),
            target=layout.topology.target,
            options={**request.options, "checkpoint": candidate.checkpoint},
            train=request.train,
            **slice_of,
        )
    except TPUOutOfMemoryError as problem:
        return Outcome(problem=f"does not fit: {_first_sentence(problem)}", is_too_large=True), True
    except XLACompilationError as problem:
        return Outcome(problem=f"does not compile: {_first_sentence(problem)}"), False
    return Outcome(report), True


def _first_sentence(problem: Exception) -> str:
    return str(problem).split(". ", 1)[0].splitlines()[0]


def described(candidate: Candidate) -> str:
    """A candidate in a few words."""
    layout = candidate.layout
    where = f"{layout.topology.target} {layout.topology}"
    how = f" {layout.mesh} {layout.sharding}" if layout.sharding else ""
    return f"{where}{how} batch {candidate.batch} checkpoint {candidate.checkpoint}"
