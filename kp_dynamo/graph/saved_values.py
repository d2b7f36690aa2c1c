"""What a joint graph saves for its backward, and what computing a saved value again would take.

The forward part of a joint graph is cut by the values that are saved: a value that is needed behind the cut and not
saved is computed again from saved ones. Moving the cut is all that gradient checkpointing does (Chen et al., Training
Deep Nets with Sublinear Memory Cost, arXiv:1604.06174).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from kp_dynamo.graph.flops import node_flops
from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.random_results import save_random_results
from kp_dynamo.graph.sizes import node_bytes


def partitioned(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph, by the min-cut partitioner and the tags that are there; on a copy."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    copy = fx.GraphModule(joint, graph)
    save_random_results(graph)
    return min_cut_rematerialization_partition(copy, [], num_fwd_outputs=num_forward_results(joint.graph))


def num_forward_results(joint: fx.Graph) -> int:
    """A joint graph returns what its forward does, and then a gradient for each of its inputs."""
    results = next(n for n in joint.nodes if n.op == "output").args[0]
    inputs = [n for n in joint.nodes if n.op == "placeholder" and not str(n.target).startswith("tangents_")]
    assert isinstance(results, (list, tuple))
    return len(results) - len(inputs)


def saved_by_min_cut(joint: fx.GraphModule) -> list[fx.Node]:
    """The values, none of them inputs, that the partitioner would save, in the order of the graph.

    In the place of a view is what it is a view of: the partitioner may save either, and always recomputes views.
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
    """Names of what a forward graph returns for its backward."""
    results = next(n for n in forward.graph.nodes if n.op == "output").args[0]
    assert isinstance(results, (list, tuple))
    return {n.name for n in results[num_returned:] if isinstance(n, fx.Node)}


class ForwardPart:
    """The forward part of a joint graph, and what of it is available to the backward.

    Args:
        joint: The graph.
        saved: What is saved; inputs are always available.
    """

    def __init__(self, joint: fx.Graph, saved: Iterable[fx.Node]) -> None:
        backward = backward_nodes(joint)
        self.nodes = [n for n in joint.nodes if n.op in ("call_function", "get_attr") and n not in backward]
        self.saved = dict.fromkeys(saved)
        self._order = {n: i for i, n in enumerate(joint.nodes)}

    def saved_bytes(self) -> int:
        return sum(map(node_bytes, self.saved))

    def to_recompute(self, node: fx.Node) -> list[fx.Node]:
        """What must run to have a saved node without saving it, itself included, in the order of the graph."""
        found, stack = {node}, list(_sources(node))
        while stack:
            source = stack.pop()
            if source not in found and source not in self.saved:
                found.add(source)
                stack += _sources(source)
        return sorted(found, key=self._order.__getitem__)

    def drop(self, node: fx.Node) -> None:
        """Save a node no longer."""
        del self.saved[node]


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    return (source for source in node.all_input_nodes if source.op != "placeholder")


def flops_of(nodes: Iterable[fx.Node]) -> int:
    """Floating point operations of the products among nodes."""
    return sum(map(node_flops, nodes))
