"""Which sizes the inputs and results of a padded graph have, for one combination of true lengths."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from kp_dynamo.buckets.refusals import REMEDY, refuse_length
from kp_dynamo.buckets.sizes import Buckets
from kp_dynamo.buckets.symbolic_sizes import Lengths, Shape, changes, evaluated, first_places, upper_bound


@dataclass(frozen=True)
class LengthPlan:
    """For one combination of true lengths: shapes of the padded inputs, the lengths, shapes of the sliced results."""

    inputs: tuple[tuple[int, Shape | float], ...]
    lengths: tuple[int, ...]
    results: tuple[tuple[int, Shape | float], ...]


class LengthPlanner:
    """Chooses the padded lengths of a capture.

    Args:
        inputs: Fake values of the inputs of Dynamo's graph.
        results: Fake values of its results.
        buckets: The padded lengths to choose from.
        strict: Raise if a length cannot be padded.

    Attributes:
        places: Symbol of a length -> the input and dimension it is read from.
        needed_sizes: Sizes in the graph that padding must not make smaller.
    """

    def __init__(self, inputs: Sequence[Any], results: Sequence[Any], buckets: Buckets, *, strict: bool) -> None:
        self._inputs, self._results, self._buckets, self._strict = inputs, results, buckets, strict
        self.places = first_places(inputs)
        self.needed_sizes: frozenset[sympy.Expr] = frozenset()

    def lengths_of(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The true lengths of a call."""
        return tuple(int(args[i].shape[d]) for i, d in self.places.values())

    def exact(self, lengths: tuple[int, ...]) -> LengthPlan:
        """The plan that pads nothing."""
        return LengthPlan((), lengths, ())

    def padded(self, lengths: tuple[int, ...], kept: Container[int]) -> LengthPlan:
        """The plan that pads to the buckets, or `exact` if these lengths cannot be padded.

        Args:
            lengths: The true lengths.
            kept: Positions of results that are not sliced.
        """
        true = dict(zip(self.places, lengths, strict=True))
        padded = self._padded_lengths(true)
        if padded == true:
            return self.exact(lengths)
        results = [None if i in kept else result for i, result in enumerate(self._results)]
        return LengthPlan(changes(self._inputs, true, padded), lengths, changes(results, padded, true))

    def _padded_lengths(self, true: Lengths) -> Lengths:
        environment = self._shape_env()
        padded = {s: self._buckets.size_for(n, upper_bound(environment, s)) for s, n in true.items()}
        reason = self._reason_against(environment, true, padded)
        if reason is None:
            return padded
        sizes = f"sizes {list(true.values())} cannot be padded to {list(padded.values())}"
        refuse_length(f"{sizes}: {reason}", strict=self._strict)
        return true

    def _reason_against(self, environment: Any, true: Lengths, padded: Lengths) -> str | None:
        # A guard that was made for true lengths must also hold for padded lengths.
        broken = next((g.expr for g in environment.guards if evaluated(g.expr, padded) == sympy.false), None)
        if broken is not None:
            return (
                f"it would break the guard {self._named(broken)} of the graph. Where your code branches on that size, "
                "use it as a number (x * (x.shape[1] > 6)), or choose buckets on the same side of the branch. If that "
                "size should not vary, mark the sizes that do with kp_dynamo.mark_sequence and leave out dynamic=True"
            )
        shrunk = next((s for s in self.needed_sizes if evaluated(s, padded) < evaluated(s, true)), None)
        return None if shrunk is None else f"a tensor of size {self._named(shrunk)} would be too short. {REMEDY}"

    def _named(self, expr: sympy.Basic) -> sympy.Basic:
        return expr.xreplace({s: sympy.Symbol(f"size {d} of input {i}") for s, (i, d) in self.places.items()})

    def _shape_env(self) -> Any:
        position, d = next(iter(self.places.values()))
        return self._inputs[position].shape[d].node.shape_env
