"""Matches the sinks of an attention: one more score for each row, dropped after the softmax. Does not edit the graph.

    softmax(cat([scores, sinks], -1) - amax)[..., :-1]

A model may subtract the largest score before the softmax, as GPT-OSS does: that changes no probability, and the
gradient through the largest score is 0 in exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.passes.attention.score_layout import are_equal
from kp_dynamo.passes.constants.values import constant_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Sinks:
    """The sinks of an attention.

    Attributes:
        scores: The scores that the sinks are appended to.
        values: The sinks, which broadcast to one number for each row, [..., S, 1].
        kept: The probabilities without those of the sinks.
        combined: The scores and the sinks.
        inside: The nodes from `combined` to `kept`, without the softmax.
    """

    scores: fx.Node
    values: fx.Node
    kept: fx.Node
    combined: fx.Node
    inside: frozenset[fx.Node]


@dataclass(frozen=True)
class SinkGradient:
    """How the gradient of the softmax's operand is divided.

    Attributes:
        d_scores: The gradient of the scores.
        d_sinks: That of the sinks, [..., S, 1]; None if they have none.
        inside: The nodes before these.
    """

    d_scores: fx.Node | None
    d_sinks: fx.Node | None
    inside: frozenset[fx.Node]


def sinks_of(softmax: fx.Node, forward: set[fx.Node]) -> Sinks | None:
    """The sinks of a softmax, if what it reads ends with a column that is dropped after it."""
    shifted: Any = softmax.args[0]
    combined, shift = _unshifted(shifted)
    if not isinstance(combined, fx.Node) or combined.target is not aten.cat.default or not _is_last(combined, 1):
        return None
    parts: Any = combined.args[0]
    if len(parts) != 2 or not _is_column(parts[1], parts[0]):
        return None
    scores, sinks = parts
    kept = [user for user in softmax.users if user in forward and _keeps(user, scores)]
    if len(kept) != 1:
        return None
    inside: set[Any] = {shifted, combined, *shift, kept[0]}
    # The gradients of the slice and of the largest score need the symbolic size; readers of a size read no values.
    inside |= {user for node in (shifted, combined, softmax) for user in node.users if user.target is aten.sym_size.int}
    return Sinks(scores, _unexpanded(sinks), kept[0], combined, frozenset(inside))


def sink_gradient(sinks: Sinks, gradient: fx.Node) -> SinkGradient | None:
    """The gradients of the scores and of the sinks, from that of the softmax's operand; None in another form."""
    whole, inside = gradient, {gradient}
    users = list(gradient.users)
    total = next((user for user in users if _adds_shift(user, gradient)), None)
    if total is not None:
        found = _shift_gradient(total, gradient, sinks)
        if found is None or {*users} != {total, found[0]}:
            return None
        inside |= {*found, total}
        whole = total
    shape = fake_of(sinks.scores).shape
    d_scores = d_sinks = None
    for user in whole.users:
        if _is_slice(user, 0, shape) and d_scores is None:
            d_scores = user
        elif _is_slice(user, shape[-1], (*shape[:-1], 1)) and d_sinks is None:
            d_sinks = user
        else:
            return None
    return SinkGradient(d_scores, d_sinks, frozenset(inside))


def without_sink_column(node: fx.Node, sinks: Sinks) -> fx.Node | None:
    """For the gradient of all probabilities, padded by 0 for the sink: the gradient of the others; None for others."""
    if node.target is not aten.slice_backward.default or list(map(str, node.args[2:])) != _slice_args(sinks.kept):
        return None
    return node.args[0]  # type: ignore[return-value]  # it is a tensor


def _slice_args(kept: fx.Node) -> list[str]:
    """The dimension, start, end and step of a slice."""
    return [str(a) for a in (*kept.args[1:], *(1,) * (5 - len(kept.args)))]


def _unshifted(node: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """What a node subtracts its largest element in a row from, and the nodes that compute that; or the node."""
    if not isinstance(node, fx.Node) or node.target is not aten.sub.Tensor or node.kwargs:
        return node, ()
    source, largest = node.args
    if not isinstance(largest, fx.Node) or largest.target is not aten.amax.default or largest.args[0] is not source:
        return node, ()
    if list(largest.args[1]) not in ([-1], [_last(source)]) or largest.args[2:] != (True,):  # type: ignore[arg-type]
        return node, ()
    return source, (largest, *_places(source, largest))


def _places(source: Any, largest: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes that find where the largest element is: autograd keeps its place for the gradient.

    They are argmax(source == largest or source is NaN).
    """
    found: list[fx.Node] = []
    for equal in largest.users:
        if equal.target is not aten.eq.Tensor or set(equal.args) != {source, largest}:
            continue
        either = [user for user in equal.users if user.target is aten.bitwise_or.Tensor]
        for node in either:
            casts = [user for user in node.users if user.target is aten._to_copy.default]
            places = [user for cast in casts for user in cast.users if user.target is aten.argmax.default]
            is_nan = [a for a in node.args if isinstance(a, fx.Node) and a.target is aten.isnan.default]
            found += [equal, node, *is_nan, *casts, *places]
    return tuple(found)


def _is_column(node: Any, scores: Any) -> bool:
    one, other = tensor_of(node), tensor_of(scores)
    if one is None or other is None or one.shape[-1] != 1 or one.dtype != other.dtype:
        return False
    return are_equal(one.shape[:-1], other.shape[:-1])


def _keeps(node: fx.Node, scores: fx.Node) -> bool:
    """Whether a node drops the last column of the probabilities."""
    if node.target is not aten.slice.Tensor or len(node.args) not in (4, 5) or not _is_last(node, 1):
        return False
    return bool(node.args[2] == 0) and are_equal(fake_of(node).shape, fake_of(scores).shape)


def _is_slice(node: fx.Node, start: Any, shape: Any) -> bool:
    """Whether a node is a slice along the last dimension, from `start` on, of this shape; sizes may be symbols."""
    if node.target is not aten.slice.Tensor or len(node.args) != 4 or not _is_last(node, 1):
        return False
    first = node.args[2].meta["val"] if isinstance(node.args[2], fx.Node) else node.args[2]
    return are_equal((first,), (start,)) and are_equal(fake_of(node).shape, shape)


def _adds_shift(node: fx.Node, gradient: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and gradient in node.args and len(set(node.args)) == 2


def _shift_gradient(total: fx.Node, gradient: fx.Node, sinks: Sinks) -> tuple[fx.Node, ...] | None:
    """The nodes that add the gradient of the largest score: minus the sum of the row, at its place."""
    one, two = total.args
    scatter = two if one is gradient else one
    if not isinstance(scatter, fx.Node) or scatter.target is not aten.scatter.src or len(scatter.users) != 1:
        return None
    zeros, _, place, summed = scatter.args
    number = constant_of(zeros)
    if number is None or number.value != 0 or place not in sinks.inside:
        return None
    if not isinstance(summed, fx.Node) or summed.target is not aten.sum.dim_IntList or len(summed.users) != 1:
        return None
    negative = summed.args[0]
    is_negative = isinstance(negative, fx.Node) and negative.target is aten.neg.default and len(negative.users) == 1
    if not is_negative or negative.args[0] is not gradient or list(summed.args[1]) not in ([-1], [_last(gradient)]):  # type: ignore[union-attr, arg-type]
        return None
    return negative, summed, scatter  # type: ignore[return-value]


def _unexpanded(node: fx.Node) -> fx.Node:
    """What a node repeats along dimensions of size 1."""
    while node.target is aten.expand.default and fake_of(node.args[0]).dim() == fake_of(node).dim():  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node


def _last(node: Any) -> int:
    return fake_of(node).dim() - 1


def _is_last(node: fx.Node, position: int) -> bool:
    """Whether the argument at `position`, a dimension, is the last one."""
    return node.args[position : position + 1] in ((-1,), (_last(node),))
