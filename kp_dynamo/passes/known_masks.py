"""What a mask made of nothing but constants lets through: computed, not guessed."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.passes.attention import Mask
from kp_dynamo.passes.base import tensor_of

aten = torch.ops.aten

# A mask of 8192 x 8192; the values on the way to it are of the same size, and are there for some milliseconds each.
_MAX_ELEMENTS = 1 << 26
_MAX_NODES = 64


Effect = Literal["keeps all", "causal", "unknown"]


def effect_of(mask: Mask, num_queries: int, num_keys: int) -> Effect:
    """What a mask does to scores [S, T]: nothing, or query i reads keys 0 to i and no others, or something else.

    To drop a score is to replace it by, or to add, -inf or nearly the least number of the dtype.
    """
    with _disable_current_modes(), torch.no_grad():
        kept = _kept(mask)
        if kept is None:
            return "unknown"
        if bool(kept.all()):
            return "keeps all"
        triangle = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
        return "causal" if torch.equal(kept.expand(num_queries, num_keys), triangle) else "unknown"


def _kept(mask: Mask) -> torch.Tensor | None:
    """Where a mask leaves scores as they are, [S|1, T|1] booleans, if it drops all others; None for any other mask."""
    value = _value(mask.node)
    if value is None or any(size != 1 for size in value.shape[:-2]) or value.dim() < 2:
        return None
    value = value.reshape(value.shape[-2:])
    if mask.is_boolean:
        return (value == mask.lets_through) if mask.fill <= _nearly_least(torch.float32) else None
    kept, dropped = value == 0, value <= _nearly_least(value.dtype)
    return kept if bool((kept | dropped).all()) else None


def _nearly_least(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).min / 4


def _value(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that no input of the graph, no attribute and no chance has a part in; None for others."""
    cone = _cone(node)
    if cone is None:
        return None
    values: dict[fx.Node, Any] = {}
    for step in cone:
        args, kwargs = fx.map_arg((step.args, dict(step.kwargs)), values.__getitem__)
        values[step] = step.target(*args, **kwargs)  # type: ignore[operator]  # an ATen operator
    result = values[node]
    return result if isinstance(result, torch.Tensor) else None


def _cone(node: fx.Node) -> list[fx.Node] | None:
    """What a node is made of, in the order of the graph, if all of it can be computed now."""
    found, stack = {node}, [node]
    while stack:
        step = stack.pop()
        if len(found) > _MAX_NODES or not _is_computable(step):
            return None
        sources = [s for s in step.all_input_nodes if s not in found]
        found.update(sources)
        stack += sources
    return sorted(found)


def _is_computable(node: fx.Node) -> bool:
    value = tensor_of(node)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or value is None:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable:
        return False
    sizes = value.shape
    return all(isinstance(size, int) for size in sizes) and value.numel() <= _MAX_ELEMENTS
