"""Matches attention in a graph: matmul, scale, soft cap, mask, softmax, matmul. Does not edit the graph.

Shapes: B batch, H heads, N = B x H, S queries, T keys, D and E widths of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.passes.attention.dropout import AppliedDropout
from kp_dynamo.passes.attention.score_chain import Mask, ScoreChain
from kp_dynamo.passes.attention.score_layout import layout_problem
from kp_dynamo.passes.attention.sinks import Sinks, sinks_of
from kp_dynamo.passes.attention.value_chain import value_chain
from kp_dynamo.passes.base import Refusal
from kp_dynamo.passes.constants.values import MAX_FACTOR

aten = torch.ops.aten


@dataclass(frozen=True)
class Attention:
    """An attention of the forward.

    Attributes:
        first: The matmul q @ k, possibly with a mask that it adds.
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
        sinks: One more score for each row, or None.
        readers: What else reads values of `inside` in the forward: they stay for it.
        reading: Describes the first of `readers`; "" without readers.
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
    sinks: Sinks | None = None
    readers: frozenset[fx.Node] = frozenset()
    reading: str = ""

    @property
    def q(self) -> fx.Node:
        """The first operand of `first`, [N, S, D]."""
        return self.first.args[-2]  # type: ignore[return-value]  # it is a tensor

    @property
    def k(self) -> fx.Node:
        """The second operand of `first`, [N, D, T]."""
        return self.first.args[-1]  # type: ignore[return-value]


def attention_at(softmax: fx.Node, forward: set[fx.Node]) -> Attention | Refusal | None:
    """The attention that a softmax of the forward belongs to, or None if it is not between two matmuls."""
    above = ScoreChain(forward)
    sinks = sinks_of(softmax, forward)
    above.walk_up(softmax.args[0] if sinks is None else sinks.scores)
    if above.first is None:
        return None
    if sinks is not None:
        above.note_batch_dims(sinks.scores)
    below = value_chain(softmax, forward, sinks)
    if below is None or isinstance(below, Refusal):
        return below
    found = Attention(
        above.first, below.second, softmax, below.weights, frozenset(above.seen | below.seen), above.scale,
        tuple(reversed(above.masks)), above.batch_dims, below.zeroes_rows, below.dropout,
        above.soft_cap, sinks,
    )  # fmt: skip
    others = list(_other_readers(found, forward))
    reading = _in_words(*others[0]) if others else ""
    problem = above.problem or _layout_problem(found, (*above.steps, *below.steps)) or _problem(found)
    if problem is None and any(node not in above.seen and node is not softmax for node, _ in others) and found.dropout:
        problem = f"{reading}, after the dropout of its probabilities"
    if problem is not None:
        return Refusal(softmax, problem)
    return replace(found, readers=frozenset(user for _, user in others), reading=reading)


def _layout_problem(found: Attention, steps: tuple[tuple[fx.Node, fx.Node], ...]) -> str | None:
    problems = (layout_problem(node, source, found.first) for node, source in steps)
    return next((problem for problem in problems if problem), None)


def _problem(found: Attention) -> str | None:
    """Why `kp::attention` cannot compute the second matmul from the operands of the first, or None."""
    scores, dim = tensor_of(found.softmax), found.softmax.args[1]
    assert scores is not None, "probabilities are a tensor"
    if dim not in (-1, scores.dim() - 1):
        return f"its softmax is over dimension {dim}, not over the keys"
    operands = (found.q, found.k, found.second.args[1], found.second)
    dtypes = {tensor_of(x).dtype for x in operands}  # type: ignore[union-attr]
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        return "its matmuls do not share one floating-point dtype"
    if abs(found.scale) > MAX_FACTOR:
        return f"its scores are multiplied by {found.scale:g}. Allowed: at most {MAX_FACTOR:g}"
    if any(isinstance(size, int) and size == 0 for size in (*scores.shape, *fake_of(found.first).shape)):
        return "it has no scores: a size is 0"
    return None


def _other_readers(found: Attention, forward: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(node, reader) for what reads the scores or probabilities besides the attention."""
    for node in sorted(found.inside):
        for user in node.users if node.target is not aten.sym_size.int else ():
            if user.op == "output" or (user in forward and user not in found.inside and user is not found.second):
                yield node, user


def _in_words(node: fx.Node, reader: fx.Node) -> str:
    is_output = reader.op == "output"
    return f"{node.name} is an output of the graph" if is_output else f"{reader.name} also reads {node.name}"
