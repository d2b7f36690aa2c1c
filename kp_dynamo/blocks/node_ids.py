"""Numbers the nodes of a graph so that nodes which compute the same from their operands have equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from kp_dynamo.cache.graph_text import node_text
from kp_dynamo.cache.identity import Uncacheable

# Dynamo logs that a slice of layers is a new ModuleList: no part of a layer, or of a block of the layers behind it.
_LOG = torch._C._log_api_usage_once


def node_ids(gm: fx.GraphModule, nodes: Sequence[fx.Node], *, with_modules: bool) -> list[int]:
    """A number per node: equal for the same operator, constants, dtypes, shapes, strides and gradient flags.

    An operand counts only as "an operand", so that the caller has to compare the edges. A node that holds an object
    without a stable text equals no other, and neither does a log.

    Args:
        gm: The graph.
        nodes: Its calls.
        with_modules: Whether nodes of different modules differ, because a pass reads the module.
    """
    numbers: dict[object, int] = {}
    operands = _Operands(gm)
    return [numbers.setdefault(_identity(gm, node, operands, with_modules), len(numbers)) for node in nodes]


def _identity(gm: fx.GraphModule, node: fx.Node, operands: _Operands, with_modules: bool) -> object:
    if node.target is _LOG:
        return node
    try:
        text = node_text(gm, node, operands)
    except Uncacheable:
        return node
    if not with_modules:
        return text
    return text, tuple(path for path, _ in dict(node.meta.get("nn_module_stack") or {}).values())


class _Operands(dict[fx.Node, str]):
    """The text of an operand: "#", but for an attribute of the graph its contents, because it is not an input."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__()
        self._gm = gm

    def __missing__(self, node: fx.Node) -> str:
        self[node] = node_text(self._gm, node, {}) if node.op == "get_attr" else "#"
        return self[node]
