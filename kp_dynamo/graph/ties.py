"""Which elements are the extreme of a row is decided with the values that the backward reads."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.nodes import backward_nodes, forward_nodes

_aten = torch.ops.aten
_EQUALITIES = (_aten.eq.Tensor, _aten.ne.Tensor)
_EXTREMES = (
    _aten.linalg_vector_norm.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.max.default,
    _aten.min.default,
)


def recompute_extremes(graph: fx.Graph) -> None:
    """Tag extremes that only gradients compare with their operands as always recomputed, in a joint graph.

    The gradients of `vector_norm(inf)`, `amax` and others go to the elements that equal the result. XLA may compute
    the result before a value is rounded to bfloat16, while the backward reads that value rounded: none is equal then,
    and a gradient is divided by their number.
    """
    others = backward_nodes(graph) | forward_nodes(graph)
    for node in graph.nodes:
        if node.target in _EQUALITIES and node not in others:
            for operand in node.all_input_nodes:
                _tag(operand)


def _tag(node: fx.Node) -> None:
    """Tag an extreme, and the views of it."""
    path = [node]
    while path[-1].target not in _EXTREMES:
        if not _is_view(path[-1]):
            return
        path.append(path[-1].all_input_nodes[0])
    for found in path:
        found.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
        found.meta.setdefault("ac_graph_id", 0)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and len(node.all_input_nodes) == 1
