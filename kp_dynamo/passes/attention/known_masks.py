"""Evaluates masks that are computed only from constants, to find out how they affect the scores.

A mask drops a score if it replaces it by -inf, or nearly the least number of float32, or adds that. The softmax then
gives the score no weight, *if its row keeps another score*. A row without any score left is different: if all scores
are the least number, the softmax is uniform over all keys, including those after the query; if all are -inf, it is NaN
or zeros. All masks together decide which scores a row keeps. So a mask is never treated as causal if another mask is
unknown, such as a padding mask of the batch: it is applied as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.pure_operators import is_pure
from kp_dynamo.passes.attention.score_chain import Mask
from kp_dynamo.passes.constants.values import Constant

aten = torch.ops.aten

# A mask of 8192 x 8192; its intermediate values have the same size and live for some milliseconds each.
_MAX_ELEMENTS = 1 << 26
_MAX_NODES = 64
_DROPPED = torch.finfo(torch.float32).min / 4
_KEPT = 1e30  # a larger bias may act as a mask

Effect = Literal["keeps all", "causal", "other"]


def without_known(masks: Sequence[Mask], num_queries: int, num_keys: int) -> tuple[list[Mask], bool]:
    """The masks of scores [S, T] that must still be applied, in order, and whether query i reads only keys 0 to i."""
    with _disable_current_modes(), torch.no_grad():
        triangle = torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
        values = [_value(mask.node) for mask in masks]
        effects = [_effect(mask, value, triangle) for mask, value in zip(masks, values, strict=True)]
        left = [i for i, effect in enumerate(effects) if effect != "keeps all"]
        others = [i for i in left if effects[i] != "causal"]
        known = [(masks[i], value) for i in left if (value := values[i]) is not None]
        # Without another mask, every query keeps key 0.
        is_causal = len(others) < len(left) == len(known) and (not others or _leaves_a_key(known, triangle))
    return [masks[i] for i in (others if is_causal else left)], is_causal


def _effect(mask: Mask, value: torch.Tensor | None, triangle: torch.Tensor) -> Effect:
    """The effect of a single mask."""
    if value is None:
        return "other"
    kept = value == (0 if mask.fill is None else mask.lets_through)
    if bool(kept.all()):
        return "keeps all"
    drops = (kept | (value <= _DROPPED)).all() if mask.fill is None else mask.fill <= _DROPPED
    return "causal" if drops and bool((kept == triangle).all()) else "other"


def _leaves_a_key(known: Sequence[tuple[Mask, torch.Tensor]], triangle: torch.Tensor) -> bool:
    """Whether masks, applied in order, drop all keys after a query and keep at least one other key."""
    stays, added = torch.ones((), dtype=torch.bool), torch.zeros(())
    for mask, value in known:
        if mask.fill is None:
            added = added + value.to(torch.float32)
        else:
            kept = value == mask.lets_through
            fill = Constant(mask.fill, None).as_float(torch.float32)
            stays, added = stays & kept, torch.where(kept, added, fill)
    is_dropped, is_kept = added <= _DROPPED, stays & (added.abs() < _KEPT)
    return bool((is_dropped | triangle).all()) and bool((is_kept & triangle).any(-1).all())


def _value(node: fx.Node) -> torch.Tensor | None:
    """The value of a node computed only from constants, without RNG; None for other nodes."""
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
    """The nodes that a node is computed from, in graph order, if all of them can be evaluated now."""
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
    if value is None or not is_pure(node.target) or node.target._schema.is_mutable:  # type: ignore[union-attr]
        return False
    sizes = value.shape
    return all(isinstance(size, int) for size in sizes) and value.numel() <= _MAX_ELEMENTS
