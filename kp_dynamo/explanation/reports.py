"""The result of `explain`: plain frozen values and their text form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_REFUSALS = 5  # of one pass in one graph; `to_dict` holds all


@dataclass(frozen=True)
class GraphBreak:
    """A graph break of Dynamo.

    Attributes:
        line: Such as "model.py:12 in forward"; "" if Dynamo reports none.
        source: The text of that line.
        reason: Dynamo's own explanation, several lines.
    """

    line: str
    source: str
    reason: str


@dataclass(frozen=True)
class CaptureReport:
    """One graph captured by Dynamo.

    Attributes:
        number: The first part of the names of its lowered graphs; None if it shares those of an earlier, equal
            capture.
        key: Digest of its key; "" if captures cannot be looked up and only AOTAutograd's graphs can.
        is_hit: Whether an equal capture is cached, so that AOTAutograd does not run.
        why_missed: The nearest cached key and the difference.
        seconds: Compile time, including all later stages.
    """

    number: int | None
    key: str
    is_hit: bool
    why_missed: str
    seconds: float


@dataclass(frozen=True)
class PassOnGraph:
    """What one pass did to one graph: places rewritten, (node, reason) of those refused, and what it decided."""

    graph: str
    name: str
    rewritten: int
    refused: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphReport:
    """One graph as it was lowered, for one set of shapes.

    Attributes:
        name: Number of its capture, and "forward", "backward" or "inference".
        key: Digest of its key; "" if the graph has no stable text, so that its program is not shared.
        is_hit: Whether an equal graph is cached.
        why_missed: The nearest cached key and the difference.
        num_operators: Number of operators in the graph.
        casts: Number of dtype casts among them, by "float32 -> bfloat16".
        num_programs: XLA programs compiled for it, 0 if it shares those of an earlier graph.
        seconds: Time spent, by stage ("trace", "xla").
    """

    name: str
    key: str
    is_hit: bool
    why_missed: str
    num_operators: int
    casts: dict[str, int]
    num_programs: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class FallbackReport:
    """An operator that falls back to the CPU: the user's line, and the bytes copied for it in this run.

    Adjacent operators run on the CPU together; their bytes are counted for the first of them.
    """

    graph: str
    op: str
    line: str
    moved_bytes: int


@dataclass(frozen=True)
class Explanation:
    """The report of one run of a model; `str()` is for people, `to_dict()` for JSON.

    Attributes:
        graph_breaks: Dynamo's graph breaks and their reasons.
        captures: Dynamo's graphs.
        passes: What each pass did to each graph.
        graphs: The graphs that were lowered.
        fallbacks: Operators that ran on the CPU.
        seconds: Time by stage: "dynamo", "aot" (AOTAutograd, partition and keys), "passes", "trace", "xla".
    """

    graph_breaks: tuple[GraphBreak, ...]
    captures: tuple[CaptureReport, ...]
    passes: tuple[PassOnGraph, ...]
    graphs: tuple[GraphReport, ...]
    fallbacks: tuple[FallbackReport, ...]
    seconds: dict[str, float]

    @property
    def num_programs(self) -> int:
        """Number of XLA programs compiled."""
        return sum(g.num_programs for g in self.graphs)

    @property
    def num_hits(self) -> int:
        """Number of graphs whose program is cached."""
        return sum(g.is_hit for g in self.graphs)

    @property
    def num_misses(self) -> int:
        """Number of graphs whose program is not cached."""
        return len(self.graphs) - self.num_hits

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        totals = {"programs": self.num_programs, "hits": self.num_hits, "misses": self.num_misses}
        return {**asdict(self), "totals": totals}

    def __str__(self) -> str:
        return text_of(self)


def text_of(explanation: Explanation) -> str:
    """Sections: graph breaks, captures, passes, graphs, operators on the CPU, seconds."""
    e = explanation
    return "\n".join(
        [
            *_section("graph breaks", e.graph_breaks, _break_lines),
            *_section("graphs captured by Dynamo", e.captures, _capture_lines),
            *_section("passes", e.passes, _pass_lines),
            *_section("graphs lowered", e.graphs, _graph_lines),
            f"XLA programs: {e.num_programs}",
            f"compile cache: {e.num_hits} hits, {e.num_misses} misses",
            *_section("operators on the CPU", e.fallbacks, _fallback_lines),
            f"seconds: {_seconds(e.seconds)}",
        ]
    )


def _section(title: str, items: Sequence[T], lines: Callable[[T], Iterator[str]]) -> Iterator[str]:
    yield f"{title}: {len(items) or 'none'}"
    for item in items:
        yield from (f"  {line}" for line in lines(item))


def _break_lines(graph_break: GraphBreak) -> Iterator[str]:
    yield f"{graph_break.line or 'at an unknown line'}: {graph_break.reason.splitlines()[0]}"
    if graph_break.source:
        yield f"  {graph_break.source}"


def _capture_lines(capture: CaptureReport) -> Iterator[str]:
    name = "equal to an earlier one" if capture.number is None else str(capture.number)
    yield f"{name}: {_looked_up(capture.key, capture.is_hit, capture.why_missed)}, {capture.seconds:.2f} s"


def _pass_lines(done: PassOnGraph) -> Iterator[str]:
    yield f"{done.graph} {done.name}: rewrote {done.rewritten}, refused {len(done.refused)}"
    yield from (f"  {note}" for note in done.notes)
    for node, reason in done.refused[:_MAX_REFUSALS]:
        yield f"  refused {node}: {reason}"
    if len(done.refused) > _MAX_REFUSALS:
        yield f"  and {len(done.refused) - _MAX_REFUSALS} more"


def _graph_lines(graph: GraphReport) -> Iterator[str]:
    made = f"{_counted(graph.num_operators, 'operator')}, {_counted(graph.num_programs, 'program')}"
    yield f"{graph.name}: {made}, {_seconds(graph.seconds)}"
    yield f"  {_looked_up(graph.key, graph.is_hit, graph.why_missed)}"
    if graph.casts:
        yield f"  casts: {', '.join(f'{count} x {pair}' for pair, count in graph.casts.items())}"


def _fallback_lines(fallback: FallbackReport) -> Iterator[str]:
    where = f" at {fallback.line}" if fallback.line else ""
    yield f"{fallback.graph} {fallback.op}{where}: {fallback.moved_bytes} bytes moved"


def _looked_up(key: str, is_hit: bool, why_missed: str) -> str:
    return f"key {key or 'none'}, {'in the cache' if is_hit else f'not in the cache: {why_missed}'}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items()) or "no time"
