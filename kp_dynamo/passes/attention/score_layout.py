"""Checks that scores keep their layout between the two matmuls of an attention. Does not edit the graph.

A batched matmul returns scores [N, S, T]. Models view them as [B, H, S, T] and back, and nothing else. Then row s of
the scores is query s, and values that broadcast to them (masks, positions) mean the same to `kp::attention`. The same
operators with transposed, regrouped, repeated, rounded or upcast scores are another computation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import PERMUTATIONS, RESHAPES

aten = torch.ops.aten

_REGROUPINGS = (
    *RESHAPES, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip


def layout_problem(node: fx.Node, source: fx.Node, matmul: fx.Node) -> str | None:
    """Why `node`, computed from the scores `source`, does not keep the layout of the scores of `matmul`, or None."""
    value, before, scores = (tensor_of(n) for n in (node, source, matmul))
    if value is None or before is None or scores is None:
        return f"{node.name} is not a tensor"
    if torch.promote_types(value.dtype, scores.dtype) != value.dtype:
        return f"{node.name} rounds its scores to {value.dtype}"
    if value.dtype == torch.float64 != scores.dtype:
        # float32 has neither the precision of float64 nor its least number, which a float64 mask may add.
        return f"{node.name} upcasts its scores to {value.dtype}"
    if node.target in _REGROUPINGS:
        is_kept = are_equal(value.shape[-2:], scores.shape[-2:])
        return None if is_kept else f"{node.name} splits queries or keys, or merges them with another dimension"
    if node.target in PERMUTATIONS:
        return f"{node.name} permutes its queries or keys"
    return None if are_equal(value.shape, before.shape) else f"{node.name} repeats its scores"


def are_equal(one: Any, other: Any) -> bool:
    """Whether sizes are equal for all values of their symbols; adds no guard."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))
