"""What a joint graph saves for its backward, and the cost of recomputing a saved value.

The saved values form a cut through the forward part of a joint graph. A value that is needed after the cut and not
saved is recomputed from saved ones. Gradient checkpointing only moves the cut (Chen et al., Training Deep Nets with
Sublinear Memory Cost, arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from kp_dynamo.graph.decisions import decide_once
from kp_dynamo.graph.flops import node_flops
from kp_dynamo.graph.nodes import backward_nodes, primal_inputs
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.graph.unrepeatable import save_unrepeatable


def partitioned(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a copy of a joint graph, by the min-cut partitioner and the graph's tags."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    copy = fx.GraphModule(joint, graph)
    save_unrepeatable(graph)
    decide_once(graph)
    return min_cut_rematerialization_partition(copy, [], num_fwd_outputs=num_forward_results(joint.graph))


def num_forward_results(joint: fx.Graph) -> int:
    """The number of forward results: a joint graph returns those, then a gradient for each input."""
    results = joint.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return len(results) - len(primal_inputs(joint))


def saved_by_min_cut(joint: fx.GraphModule) -> list[fx.Node]:
    """The values that the partitioner would save, without inputs, in graph order.

    A view is replaced by its base: the partitioner may save either, and always recomputes views.
    """
    forward, _ = partitioned(joint)
    names = saved_names(forward, num_forward_results(joint.graph))
    bases = {_viewed(n) for n in joint.graph.nodes if n.name in names}
    return [n for n in joint.graph.nodes if n in bases and n.op != "placeholder"]


def _viewed(node: fx.Node) -> fx.Node:
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        source = node.all_input_nodes[0]
        if node_bytes(source) != node_bytes(node):
            break
        node = source
    return node


def saved_names(forward: fx.GraphModule, num_returned: int) -> set[str]:
    """Names of the values that a forward graph returns for its backward."""
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    return {n.name for n in results[num_returned:] if isinstance(n, fx.Node)}


class ForwardPart:
    """The forward part of a joint graph, and the values of it that the backward can read.

    Args:
        joint: The graph.
        saved: The saved values; inputs are always available.
    """

    def __init__(self, joint: fx.Graph, saved: Iterable[fx.Node]) -> None:
        backward = backward_nodes(joint)
        self.nodes = [n for n in joint.nodes if n.op in ("call_function", "get_attr") and n not in backward]
        self.saved = dict.fromkeys(saved)
        self._order = {n: i for i, n in enumerate(joint.nodes)}

    def saved_bytes(self) -> int:
        return sum(map(node_bytes, self.saved))

    def to_recompute(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that must run to recompute a saved node, including itself, in graph order."""
        found, stack = {node}, list(_sources(node))
        while stack:
            source = stack.pop()
            if source not in found and source not in self.saved:
                found.add(source)
                stack += _sources(source)
        return sorted(found, key=self._order.__getitem__)

    def drop(self, node: fx.Node) -> None:
        """Stop saving a node."""
        del self.saved[node]


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    return (source for source in node.all_input_nodes if source.op != "placeholder")


def flops_of(nodes: Iterable[fx.Node]) -> int:
    """Floating point operations of the matmuls among nodes."""
    return sum(map(node_flops, nodes))
