"""Copies of Dynamo's graph to divide: AOTAutograd gets the original if the graph stays whole."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx


def _once(node: fx.Node) -> bool:
    return False


def copied(gm: fx.GraphModule, repeats: Callable[[fx.Node], bool] = _once) -> fx.GraphModule:
    """A copy of a graph with nodes of its own.

    Args:
        gm: Dynamo's graph.
        repeats: The nodes that are computed again before each node that reads them.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if not repeats(node):
            new[node] = graph.node_copy(node, _Operands(graph, new).__getitem__)
        if node.op == "placeholder":
            new[node]._dynamo_source = getattr(node, "_dynamo_source", None)
    copy = fx.GraphModule(gm, graph)
    copy.meta.update(gm.meta)
    return copy


class _Operands(dict[fx.Node, fx.Node]):
    """The operands of one node; those that were not copied are computed here, with their own operands."""

    def __init__(self, graph: fx.Graph, new: dict[fx.Node, fx.Node]) -> None:
        super().__init__(new)
        self._graph = graph

    def __missing__(self, node: fx.Node) -> fx.Node:
        self[node] = self._graph.node_copy(node, self.__getitem__)
        return self[node]
