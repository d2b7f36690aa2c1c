"""What a pass is: a frozen value that edits an ATen graph in place and reports what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import fx

PADDED_SIZES = "kp_padded_sizes"  # in a graph's meta: the expressions of its sizes, where `mask_padding` has padded it


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


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor a node stands for, or None where it is not a single tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of a joint graph that depend on an incoming gradient (AOTAutograd's `tangents_*`)."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and str(node.target).startswith("tangents_")
        if is_tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return {node for node in found if node.op != "output"}


def forward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that an output of the forward needs: the others, in a joint graph, only feed gradients."""
    backward = backward_nodes(graph)
    results = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    found: set[fx.Node] = set()
    stack = [node for node in results if node not in backward]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def calls(graph: fx.Graph, *targets: object) -> Iterator[fx.Node]:
    """Call nodes of `targets`, in graph order, of a snapshot that edits do not disturb."""
    return (n for n in list(graph.nodes) if n.op == "call_function" and n.target in targets)
