"""The floating point operations of a model's matmuls, counted by torch's own formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.graph.nodes import is_tangent
from kp_dynamo.graph.waiting import waited_for


def model_flops(graph: fx.Graph) -> int:
    """The operations of the matmuls, convolutions and attention of an ATen graph; symbolic sizes count by their hints.

    Counts as `torch.utils.flop_counter.FlopCounterMode` does: a multiplication and an addition are two operations, and
    pointwise work is free. The gradient of a grouped weight differs: torch 2.9 counts it as if there were one group.
    """
    return sum(map(node_flops, graph.nodes))


def least_flops(graph: fx.Graph) -> int:
    """`model_flops` without what causal attention may skip: the scores of queries with later keys."""
    return sum(node_flops(node) - _skipped_flops(node) for node in graph.nodes)


def _skipped_flops(node: fx.Node) -> int:
    """What a node of causal attention may skip; 0 for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "kp":
        return 0
    names = [argument.name for argument in node.target._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if not given.get("is_causal"):
        return 0
    q, k = (given[name].meta["val"].shape for name in ("q", "k"))  # [N, S, D], [M, D, T]
    queries, keys = hint_int(q[1], fallback=1), hint_int(k[2], fallback=1)
    near = min(queries, keys)
    read = near * (near + 1) // 2 + (queries - near) * keys
    return node_flops(node) * (queries * keys - read) // (queries * keys)


def recomputed_flops(graph: fx.Graph) -> int:
    """The part of `model_flops` that a backward graph spends on computing the forward again.

    A gradient depends on a tangent. A matmul that does not was in the forward, whether a pass, the partitioner or the
    user's own checkpoint put it here. A graph without tangents, such as a forward, recomputes nothing.
    """
    of_gradients = {node for node in graph.find_nodes(op="placeholder") if is_tangent(node)}
    if not of_gradients:
        return 0
    for node in graph.nodes:
        if not of_gradients.isdisjoint(_computed_from(node)):
            of_gradients.add(node)
    return sum(node_flops(node) for node in graph.nodes if node not in of_gradients)


def _computed_from(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node reads; what a wait lets through is one value, whatever it waits for."""
    through = waited_for(node)
    return node.all_input_nodes if through is None else [through]


def node_flops(node: fx.Node) -> int:
    """The operations of one node; 0 if it is not a matmul."""
    formula = flop_registry.get(node.target.overloadpacket) if isinstance(node.target, torch._ops.OpOverload) else None
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda source: source.meta["val"])
    args, kwargs, result = tree_map(_at_hint, (args, kwargs, node.meta["val"]))
    if node.target == torch.ops.aten.convolution_backward.default:
        return _convolution_backward_flops(args, result)
    return int(formula(*args, **kwargs, out_val=result))


def _convolution_backward_flops(args: tuple[Any, ...], result: Any) -> int:
    """torch's formula multiplies all input channels by all output channels for the gradient of a grouped weight."""
    formula = flop_registry[torch.ops.aten.convolution_backward]
    *given, groups, (of_input, of_weight, _) = args
    flops = formula(*given, groups, [True, False, False], out_val=result) if of_input else 0
    if of_weight:
        flops += formula(*given, groups, [False, True, False], out_val=result) // groups
    return int(flops)


def _at_hint(value: object) -> object:
    """A symbolic size, or a tensor of such sizes, at its hint: reading the symbol itself would specialize it."""
    if isinstance(value, torch.SymInt):
        return hint_int(value, fallback=1)
    if isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape):
        return torch.empty([hint_int(size, fallback=1) for size in value.shape], dtype=value.dtype, device="meta")
    return value
