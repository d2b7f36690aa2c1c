"""What a pass is: a frozen value that edits an ATen graph in place and reports what it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import fx


@dataclass(frozen=True)
class PassReport:
    """What one run of one pass did to one graph.

    Attributes:
        name: Name of the pass, in snake case ("cast_bf16").
        rewritten: Number of places rewritten; 0 means that the graph is untouched.
        refused: Pairs (node name, reason) of places that look like a match and were left alone.
        notes: What else a user should know of it: decisions, and the figures behind them.
    """

    name: str
    rewritten: int
    refused: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain values fit for JSON."""
        return {
            "name": self.name,
            "rewritten": self.rewritten,
            "refused": [list(pair) for pair in self.refused],
            "notes": list(self.notes),
        }


@runtime_checkable
class GraphPass(Protocol):
    """A frozen dataclass whose fields are its options; its `repr` enters the compile key.

    Calling it edits `gm.graph` in place (functional ATen, static or symbolic shapes, every tensor
    node with a fake CPU tensor in `node.meta["val"]`). A joint graph (forward and backward in one,
    see `backward_nodes`) and an inference graph are both given to the same pass.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, gm: fx.GraphModule) -> PassReport: ...
