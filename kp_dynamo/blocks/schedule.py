"""Runs compiled pieces one after the other, and drops each value after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PieceCall:
    """One call of a piece. Values are numbered: first the inputs of the whole graph, then the results of the steps.

    Attributes:
        piece: Number of the piece.
        inputs: The values that it takes.
        outputs: The numbers of the values that it returns; None for a value that nothing reads.
        dead: Values that no later step and no result reads.
    """

    piece: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """The steps that compute a whole graph.

    Attributes:
        steps: In the order in which they run.
        results: The value of each result; a result that is a constant of the graph is the constant itself.
    """

    steps: tuple[PieceCall, ...]
    results: tuple[int | Constant, ...]

    def around(self, pieces: Sequence[Callable[..., Any]]) -> Callable[..., list[Any]]:
        """A callable with the arguments and results of the whole graph."""

        def run(*args: Any) -> list[Any]:
            values: dict[int, Any] = dict(enumerate(args))
            for step in self.steps:
                given = [values[number] for number in step.inputs]
                for number in step.dead:
                    del values[number]
                computed = pieces[step.piece](*given)
                given.clear()
                values.update((n, v) for n, v in zip(step.outputs, computed, strict=True) if n is not None)
            return [values[r] if isinstance(r, int) else r.value for r in self.results]

        return run


@dataclass(frozen=True)
class Constant:
    """A result that does not depend on the arguments."""

    value: Any


def with_dead_values(steps: Sequence[PieceCall], results: Sequence[int | Constant]) -> Schedule:
    """A schedule that drops each value after the last step that reads it, unless it is a result."""
    needed = {result for result in results if isinstance(result, int)}
    found: list[PieceCall] = []
    for step in reversed(steps):
        outputs = tuple(number if number in needed else None for number in step.outputs)
        dead = tuple(dict.fromkeys(number for number in step.inputs if number not in needed))
        needed.update(dead)
        found.append(PieceCall(step.piece, step.inputs, outputs, dead))
    return Schedule(tuple(reversed(found)), tuple(results))
