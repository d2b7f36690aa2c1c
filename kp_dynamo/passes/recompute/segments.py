"""Splits the recomputed nodes of a backward graph into independent segments.

Recomputed are the nodes that depend on no tangent. Among them are

* light ones: views and pointwise work on existing values. XLA fuses them into their readers, so they hold no memory;
* free ones: nodes that need no saved activation, such as masks, position tables, and a first block after the embedding;
* rooted ones: all others. Connected rooted nodes form one segment.

A light or free node belongs to the segment of its readers if that is one segment. A node that several segments read (a
mask) belongs to none, and connects none. Free nodes that hold memory and that no segment reads form segments of their
own. A light node that one place of the backward reads (the transposed weight of a matmul) belongs to the segment of
its source, if that has one. Otherwise the source, the weight's cast, would be computed at the start, and with it the
casts of all weights.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import is_pointwise
from kp_dynamo.graph.sizes import node_bytes

aten = torch.ops.aten

_SMALL = 1 << 14
_LIGHT_COPIES = (aten.clone.default, aten._unsafe_view.default, operator.getitem)


def recomputed_segments(graph: fx.Graph, backward: set[fx.Node]) -> list[list[fx.Node]]:
    """The segments that hold memory, each in graph order."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and n not in backward]
    saved, heavy = _saved_and_heavy(graph, nodes, backward)
    rooted = saved & heavy
    segments = _Segments()
    for node in (n for n in nodes if n in rooted):
        segments.join(node, [s for s in node.all_input_nodes if s in rooted])
    free = set[fx.Node]()
    for node in reversed([n for n in nodes if n not in rooted]):
        _place(node, segments, free, node in heavy)
    return [s for s in segments.in_order(nodes) if any(map(_holds_memory, s))]


def _saved_and_heavy(
    graph: fx.Graph, nodes: list[fx.Node], backward: set[fx.Node]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Nodes that need a saved activation; nodes that hold memory, or read one that does."""
    saved = {n for n in graph.nodes if n.op == "placeholder" and n not in backward and _is_activation(n)}
    heavy = set[fx.Node]()
    for node in nodes:
        if any(s in saved for s in node.all_input_nodes):
            saved.add(node)
        if _holds_memory(node) or any(s in heavy for s in node.all_input_nodes):
            heavy.add(node)
    return saved, heavy


def _place(node: fx.Node, segments: _Segments, free: set[fx.Node], is_heavy: bool) -> None:
    """Add a light or free node to the segment of its readers; `free` are the nodes in segments of free nodes only."""
    readers = [u for u in node.users if segments.has(u)]
    owners = {segments.of(u) for u in readers}
    is_shared = len(owners) > 1 and not all(u in free for u in readers)
    if is_shared or any(u in segments.shared for u in node.users):
        segments.shared.add(node)
    elif readers or is_heavy:
        segments.join(node, readers)
        segments.take_loose_users(node)
        free |= {node} if all(u in free for u in readers) else set()
    else:  # only the backward reads it; if it does so at several places, none of them may open the gate
        (segments.loose if len(node.users) == 1 else segments.shared).add(node)


class _Segments:
    """Disjoint sets of nodes.

    Attributes:
        shared: Nodes that several segments read, or only the backward, at several places.
        loose: Nodes that only the backward reads, at one place, until a segment has their source.
    """

    def __init__(self) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self.shared: set[fx.Node] = set()
        self.loose: set[fx.Node] = set()

    def has(self, node: fx.Node) -> bool:
        return node in self._parent

    def of(self, node: fx.Node) -> fx.Node:
        """The node that represents a node's segment."""
        while (parent := self._parent[node]) is not node:
            self._parent[node] = self._parent[parent]
            node = parent
        return node

    def join(self, node: fx.Node, others: list[fx.Node]) -> None:
        """Merge a new node and the segments of others into one."""
        self._parent[node] = node
        for other in others:
            self._parent[self.of(other)] = self.of(node)

    def take_loose_users(self, node: fx.Node) -> None:
        """Make loose users of a node wait with it, so that it is not needed earlier."""
        for user in [u for u in node.users if u in self.loose]:
            self.loose.remove(user)
            self.join(user, [node])
            self.take_loose_users(user)

    def in_order(self, nodes: list[fx.Node]) -> list[list[fx.Node]]:
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            if node in self._parent:
                found.setdefault(self.of(node), []).append(node)
        return list(found.values())


def _is_activation(placeholder: fx.Node) -> bool:
    """Whether a placeholder was saved: AOTAutograd names inputs primals, in the backward too."""
    return not str(placeholder.target).startswith("primals_") and tensor_of(placeholder) is not None


def _holds_memory(node: fx.Node) -> bool:
    """Whether a node's value is in memory: XLA fuses pointwise work, views and moves into their readers."""
    is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
    is_light = is_view or node.target in _LIGHT_COPIES or is_pointwise(node)
    return not is_light and bool(node.all_input_nodes) and node_bytes(node) >= _SMALL
