"""Matches attention in a graph: matmul, scale, soft cap, mask, softmax, matmul. Does not edit the graph.

Shapes: B batch, H heads, N = B x H, S queries, T keys, D and E widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.passes.attention.dropout import AppliedDropout
from kp_dynamo.passes.attention.score_chain import Mask, ScoreChain
from kp_dynamo.passes.attention.score_layout import layout_problem
from kp_dynamo.passes.attention.value_chain import value_chain
from kp_dynamo.passes.base import Refusal
from kp_dynamo.passes.constants.values import MAX_FACTOR


@dataclass(frozen=True)
class Attention:
    """An attention of the forward.

    Attributes:
        first: The matmul q @ k.
        second: The matmul of the probabilities and v.
        softmax: The node between them.
        weights: The first operand of `second`.
        inside: The nodes from `first` to `second`, without `second`.
        scale: The factor of the scores, applied after `first`.
        masks: In the order in which they are applied.
        batch_dims: Sizes of the scores before [S, T], some of which a mask may have; numbers or nodes.
        zeroes_rows: Whether a row without a score above -inf becomes 0: torch's "safe" softmax.
        dropout: The dropout of the probabilities, or None.
        soft_cap: The bound of the scores, `soft_cap * tanh(scores / soft_cap)`, or 0.
    """

    first: fx.Node
    second: fx.Node
    softmax: fx.Node
    weights: fx.Node
    inside: frozenset[fx.Node]
    scale: float
    masks: tuple[Mask, ...]
    batch_dims: tuple[Any, ...]
    zeroes_rows: bool
    dropout: AppliedDropout | None
    soft_cap: float = 0.0


def attention_at(softmax: fx.Node, forward: set[fx.Node]) -> Attention | Refusal | None:
    """The attention that a softmax of the forward belongs to, or None if it is not between two matmuls."""
    above = ScoreChain(forward)
    above.walk_up(softmax.args[0])
    if above.first is None:
        return None
    below = value_chain(softmax, forward)
    if below is None or isinstance(below, Refusal):
        return below
    found = Attention(
        above.first, below.second, softmax, below.weights, frozenset(above.seen | below.seen), above.scale,
        tuple(reversed(above.masks)), above.batch_dims, below.zeroes_rows, below.dropout,
        above.soft_cap,
    )  # fmt: skip
    problem = above.problem or _layout_problem(found, (*above.steps, *below.steps)) or _problem(found, forward)
    return found if problem is None else Refusal(softmax, problem)


def _layout_problem(found: Attention, steps: tuple[tuple[fx.Node, fx.Node], ...]) -> str | None:
    problems = (layout_problem(node, source, found.first) for node, source in steps)
    return next((problem for problem in problems if problem), None)


def _problem(found: Attention, forward: set[fx.Node]) -> str | None:
    """Why `kp::attention` cannot compute the second matmul from the operands of the first, or None."""
    scores, dim = tensor_of(found.softmax), found.softmax.args[1]
    assert scores is not None, "probabilities are a tensor"
    if dim not in (-1, scores.dim() - 1):
        return f"its softmax is over dimension {dim}, not over the keys"
    operands = (*found.first.args, found.second.args[1], found.second)
    dtypes = {tensor_of(x).dtype for x in operands}  # type: ignore[union-attr]
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        return "its matmuls do not share one floating-point dtype"
    if abs(found.scale) > MAX_FACTOR:
        return f"its scores are multiplied by {found.scale:g}. Allowed: at most {MAX_FACTOR:g}"
    if any(isinstance(size, int) and size == 0 for size in scores.shape):
        return "it has no scores: a size is 0"
    return _other_reader(found, forward)


def _other_reader(found: Attention, forward: set[fx.Node]) -> str | None:
    for node in sorted(found.inside):
        for user in node.users:
            if user.op == "output":
                return f"{node.name} is an output of the graph"
            if user in forward and user not in found.inside and user is not found.second:
                return f"{user.name} also reads {node.name}"
    return None
