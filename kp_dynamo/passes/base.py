"""The interface of a pass: a frozen value that edits an ATen graph in place and reports what it did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import fx

from kp_dynamo.graph.edit_example import EditExample
from kp_dynamo.graph.places import Place


@dataclass(frozen=True)
class Errors:
    """Relative errors |difference| / |reference| over all results, and over all gradients, of a graph.

    Attributes:
        results: That of the results; None if there are no floating-point results, or they were not compared.
        gradients: That of the gradients; None also in inference.
    """

    results: float | None = None
    gradients: float | None = None

    @property
    def are_finite(self) -> bool:
        """Whether neither is infinite."""
        return all(error is None or math.isfinite(error) for error in (self.results, self.gradients))

    def exceed(self, bounds: Errors) -> bool:
        """Whether one of them is above its bound."""
        pairs = ((self.results, bounds.results), (self.gradients, bounds.gradients))
        return any(error is not None and bound is not None and error > bound for error, bound in pairs)

    def at_least(self, other: Errors) -> Errors:
        """The larger error of each kind."""
        return Errors(_larger(self.results, other.results), _larger(self.gradients, other.gradients))


def _larger(a: float | None, b: float | None) -> float | None:
    return max((error for error in (a, b) if error is not None), default=None)


@dataclass(frozen=True)
class PassErrors:
    """What the option `ledger` measured of one pass on one graph.

    Attributes:
        before: The errors against the graph before the pass.
        exact: Those against the captured graph in float64.
        bound: What `exact` may be.
        is_taken_back: Whether a bound was exceeded, so that the graph is compiled without the pass.
        reason: What was not compared, and why; "" if all was.
    """

    before: Errors = Errors()
    exact: Errors = Errors()
    bound: Errors = Errors()
    is_taken_back: bool = False
    reason: str = ""

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PassErrors:
        """The inverse of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError: The content is not a PassErrors.
        """
        errors = {name: Errors(**content[name]) for name in ("before", "exact", "bound")}
        return cls(**{**content, **errors})


@dataclass(frozen=True)
class PassReport:
    """What one run of one pass did to one graph.

    Attributes:
        name: Name of the pass, in snake case ("cast_bf16").
        rewritten: Number of matches rewritten; 0 means that the graph is unchanged.
        refused: Pairs (node name, reason) for matches that the pass left alone.
        notes: Further facts for the user: decisions, and the figures behind them.
        places: The place in the model of each of `refused`; `run_pipeline` fills them in.
        errors: What the pass did to the numbers; None without the option `ledger`. `run_pipeline` fills it in.
        example: Some operators before and after; None unless a report asks for it. `run_pipeline` fills it in.
    """

    name: str
    rewritten: int
    refused: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    places: tuple[Place, ...] = ()
    errors: PassErrors | None = None
    example: EditExample | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON."""
        return {
            "name": self.name,
            "rewritten": self.rewritten,
            "refused": [list(pair) for pair in self.refused],
            "notes": list(self.notes),
            "places": [asdict(place) for place in self.places],
            **({} if self.errors is None else {"errors": asdict(self.errors)}),
            **({} if self.example is None else {"example": asdict(self.example)}),
        }


@runtime_checkable
class GraphPass(Protocol):
    """A frozen dataclass whose fields are its options; its `repr` enters the compile key.

    Calling it edits `gm.graph` in place (functional ATen, static or symbolic shapes, every tensor
    node with a fake CPU tensor in `node.meta["val"]`). The same pass runs on joint graphs (forward and backward in one,
    see `backward_nodes`) and on inference graphs.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, gm: fx.GraphModule) -> PassReport: ...


@dataclass(frozen=True)
class Refusal:
    """A match that a pass reports and does not rewrite.

    A matcher returns `Match | Refusal | None`; None if the node is no match at all. A check within a matcher returns
    the reason as text, or None.
    """

    node: fx.Node
    reason: str


def reported(refusals: Iterable[Refusal]) -> tuple[tuple[str, str], ...]:
    """Refusals as `PassReport.refused` has them."""
    return tuple((refusal.node.name, refusal.reason) for refusal in refusals)


Match = TypeVar("Match")


def rewrite_each(
    name: str,
    nodes: Iterable[fx.Node],
    match: Callable[[fx.Node], Match | Refusal | None],
    rewrite: Callable[[Match], None],
) -> PassReport:
    """Rewrite each match that begins at one of `nodes`, before the next node is matched; report the refusals."""
    rewritten, refused = 0, []
    for node in nodes:
        found = match(node)
        if isinstance(found, Refusal):
            refused.append(found)
        elif found is not None:
            rewrite(found)
            rewritten += 1
    return PassReport(name, rewritten, reported(refused))
