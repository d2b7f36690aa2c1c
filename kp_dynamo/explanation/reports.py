"""What `explain` returns: plain frozen values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class GraphBreak:
    """Where Dynamo ended a graph.

    Attributes:
        line: "model.py:12 in forward"; "" where Dynamo names none.
        source: The text of that line.
        reason: Dynamo's own explanation, several lines.
    """

    line: str
    source: str
    reason: str


@dataclass(frozen=True)
class CaptureReport:
    """One graph of Dynamo's.

    Attributes:
        number: The first part of the names of the graphs made of it; None where it shares those of an equal
            capture before it.
        key: Digest of its key; "" where only AOTAutograd's own graphs may be looked up.
        is_hit: An equal capture is cached, and AOTAutograd is spared.
        why_missed: The nearest cached key and what differs.
        seconds: What it took, everything below included.
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
        key: Digest of its key; "" where the graph has no stable text and is shared with no other.
        is_hit: An equal graph is cached.
        why_missed: The nearest cached key and what differs.
        num_operators: Operators in the graph.
        casts: Conversions of dtype among them, by "float32 -> bfloat16".
        num_programs: XLA programs made for it, 0 where it shares those of an earlier graph.
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
    """An operator that runs on the CPU: the user's line, and the bytes that moved for it in this run.

    Neighbours run on the CPU together; what they move is counted at the first of them.
    """

    graph: str
    op: str
    line: str
    moved_bytes: int


@dataclass(frozen=True)
class Explanation:
    """What one run of a model brought about; `str()` is for people, `to_dict()` for JSON.

    Attributes:
        graph_breaks: Where Dynamo ended a graph, and why.
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
        """XLA programs that were made."""
        return sum(g.num_programs for g in self.graphs)

    @property
    def num_hits(self) -> int:
        """Graphs for which a program is cached."""
        return sum(g.is_hit for g in self.graphs)

    @property
    def num_misses(self) -> int:
        """Graphs for which none is."""
        return len(self.graphs) - self.num_hits

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        totals = {"programs": self.num_programs, "hits": self.num_hits, "misses": self.num_misses}
        return {**asdict(self), "totals": totals}

    def __str__(self) -> str:
        from kp_dynamo.explanation.report_text import text_of

        return text_of(self)
