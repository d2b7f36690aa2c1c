"""Floating point operations that a model asks for: its products, by torch's own formulas."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry


def model_flops(graph: fx.Graph) -> int:
    """Operations of the matrix products, convolutions and attention of an ATen graph of static shapes.

    Counted as `torch.utils.flop_counter.FlopCounterMode` does: a multiplication and an addition are two, and
    pointwise work is free.
    """
    return sum(map(node_flops, graph.nodes))


def node_flops(node: fx.Node) -> int:
    """The same of one node; 0 for what is no product."""
    formula = flop_registry.get(node.target.overloadpacket) if isinstance(node.target, torch._ops.OpOverload) else None
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))
