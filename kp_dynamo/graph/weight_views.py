"""Parameters of a graph, their transposed views, and the matmuls that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.reshapes import transposed_order

aten = torch.ops.aten
_KEEPS = (aten.clone, aten.alias, aten.detach, aten._to_copy)
_TRANSPOSES = (aten.t, aten.transpose, aten.permute)


@dataclass(frozen=True)
class Weight:
    """A parameter, or a view or copy of one with the same elements.

    Attributes:
        node: Its placeholder.
        dims: For each dimension of the view, that of the parameter.
    """

    node: fx.Node
    dims: tuple[int, ...]


def view_of(node: fx.Node, weights: Mapping[fx.Node, Weight]) -> Weight | None:
    """What a node makes of a weight; None if it is not such a view."""
    packet = getattr(node.target, "overloadpacket", None)
    base = weights.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if base is None or packet not in (*_KEEPS, *_TRANSPOSES):
        return None
    order = transposed_order(node) if packet in _TRANSPOSES else range(len(base.dims))
    return Weight(base.node, tuple(base.dims[i] for i in order))


def weight_matmul(node: fx.Node, weights: Mapping[fx.Node, Weight]) -> tuple[fx.Node, Weight, Weight | None] | None:
    """(first operand [M, K], weight [K, N], bias [N] or None) of a matmul with a weight; None for anything else."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet is aten.mm:
        bias, left, right = None, *node.args[:2]
    elif packet is aten.addmm:
        bias, left, right = node.args[:3]
    else:
        return None
    if not isinstance(left, fx.Node) or left in weights or not isinstance(right, fx.Node) or right not in weights:
        return None
    added = weights.get(bias) if isinstance(bias, fx.Node) else None
    if isinstance(bias, fx.Node) and (added is None or len(added.dims) != 1):
        return None
    if added is not None and fake_of(added.node).shape[0] != fake_of(right).shape[1]:
        return None  # one number for all outputs
    return left, weights[right], added
