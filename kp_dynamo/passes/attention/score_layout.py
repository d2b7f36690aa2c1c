"""Whether what is between the two matmuls of an attention stays where the first has it. Reads, edits nothing.

A batched matmul gives scores [N, S, T]. Models view them as [B, H, S, T] and back, and nothing else: then row s of
them is query s, and whatever broadcasts to them (masks, positions) means the same to `kp::attention`. Scores that are
transposed, regrouped, repeated, rounded or widened on their way are another computation in the same operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kp_dynamo.graph.nodes import tensor_of

aten = torch.ops.aten

_REGROUPINGS = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
_PERMUTATIONS = (aten.t.default, aten.transpose.int, aten.permute.default)
_WIDE_ENOUGH = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def layout_problem(node: fx.Node, source: fx.Node, matmul: fx.Node) -> str | None:
    """Why `node`, made of the scores `source`, is not the scores of `matmul` where they were, or None."""
    value, before, scores = (tensor_of(n) for n in (node, source, matmul))
    if value is None or before is None or scores is None:
        return f"{node.name} is no tensor"
    if value.dtype not in _WIDE_ENOUGH:
        return f"{node.name} rounds its scores to {value.dtype}"
    if value.dtype == torch.float64 != scores.dtype:
        # float32 holds neither its precision nor its least number, which a mask of float64 may add.
        return f"{node.name} widens its scores to {value.dtype}"
    if node.target in _REGROUPINGS:
        is_kept = _are_equal(value.shape[-2:], scores.shape[-2:])
        return None if is_kept else f"{node.name} takes queries and keys apart, or together with something else"
    if node.target in _PERMUTATIONS:
        return f"{node.name} moves its queries or keys"
    return None if _are_equal(value.shape, before.shape) else f"{node.name} repeats its scores"


def _are_equal(one: Any, other: Any) -> bool:
    """Whether sizes are equal for every value that their symbols may have: no guard is added."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))
