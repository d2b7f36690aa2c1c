"""Floating point operations that a model asks for: its products, by torch's own formulas."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry


def model_flops(graph: fx.Graph) -> int:
    """Operations of the matrix products, convolutions and attention of an ATen graph; symbolic sizes by their hints.

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
    args, kwargs, result = tree_map(_at_hint, (args, kwargs, node.meta["val"]))
    return int(formula(*args, **kwargs, out_val=result))


def _at_hint(value: object) -> object:
    """A tensor or size of symbols as the number it was traced with: asking a symbol would fix it for good."""
    if isinstance(value, torch.SymInt):
        return hint_int(value, fallback=1)
    if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
        return torch.empty([hint_int(size, fallback=1) for size in value.shape], dtype=value.dtype, device="meta")
    return value
