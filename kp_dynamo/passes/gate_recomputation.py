"""The pass `gate_recomputation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from kp_dynamo.graph.nodes import backward_nodes, tensor_of
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.graph.waiting import insert_wait
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.recompute.segments import recomputed_segments

_BARRIER = torch.ops.kp.optimization_barrier.default


@dataclass(frozen=True)
class GateRecomputation:
    """Make each recomputed segment of a backward wait for its incoming gradient.

        before                                    after
        h = f(saved)                              wait = kp.optimization_barrier([saved], g)
                                                  saved_1, g_1 = wait[0], wait[1]
        ...                                       h = f(saved_1)
        d = h_backward(g, h)                      d = h_backward(g_1, h)

    XLA may schedule nodes that depend only on saved values as early as it likes, and all segments at once.
    Recomputation then reduces the saved bytes but not the peak. A segment's gate covers all of its inputs and the
    gradient that its first reader in the backward takes.
    """

    name: ClassVar[str] = "gate_recomputation"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        backward = backward_nodes(gm.graph)
        order = {n: i for i, n in enumerate(gm.graph.nodes)}
        segments = recomputed_segments(gm.graph, backward)
        gates = [g for s in segments if (g := _gate(s, backward, order)) is not None]
        _hoist(gm.graph, {n for gate in gates for n in gate.needed})
        for gate in gates:
            gate.insert(gm.graph)
        return PassReport(self.name, len(gates))


def _hoist(graph: fx.Graph, inputs: set[fx.Node]) -> None:
    """Move the nodes that segments share to the front: a segment may now run earlier than these nodes did."""
    needed = set(inputs)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for node in [n for n in graph.nodes if n in needed and n.op != "placeholder"]:
        last.append(node)
        last = node


@dataclass(frozen=True)
class _Gate:
    """The gate of a segment: its nodes in order, their inputs, and the gradient that its first reader takes."""

    segment: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    reader: fx.Node
    gradient: fx.Node

    @property
    def needed(self) -> set[fx.Node]:
        """The values that the segment reads from outside."""
        return {s for n in self.segment for s in n.all_input_nodes} - set(self.segment)

    def insert(self, graph: fx.Graph) -> None:
        passed = (*self.inputs, self.gradient)
        with graph.inserting_before(self.reader):
            gated = insert_wait(graph, _BARRIER, passed)
        for source, waiting in zip(passed, gated, strict=True):
            for user in [u for u in source.users if u in self.segment]:
                user.replace_input_with(source, waiting)
        self.reader.replace_input_with(self.gradient, gated[-1])
        for node in self.segment:
            self.reader.prepend(node)


def _gate(segment: list[fx.Node], backward: set[fx.Node], order: dict[fx.Node, int]) -> _Gate | None:
    nodes = set(segment)
    readers = [u for n in nodes for u in n.users if u in backward]
    if not readers:
        return None
    reader = min(readers, key=order.__getitem__)
    gradients = [s for s in reader.all_input_nodes if s in backward and _is_signal(s)]
    if not gradients:
        return None
    sources = dict.fromkeys(s for n in segment for s in n.all_input_nodes)
    inputs = tuple(s for s in sources if s not in nodes and tensor_of(s) is not None and not _is_constant(s))
    return _Gate(tuple(segment), inputs, reader, max(gradients, key=node_bytes))


def _is_constant(node: fx.Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)


def _is_signal(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype.is_floating_point and node_bytes(node) > 0
