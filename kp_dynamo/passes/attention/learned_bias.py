"""The gradient of a bias that is added to the scores of every sequence: T5's relative positions.

Autograd sums the gradients of the scores [B, H, S, T] over the batch, for the attentions of several layers together if
they read one sum of the bias and a mask. The operator returns the sum of each attention, [H, S, T]. With one sequence
there is no sum: the gradient of the scores is read as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.editing import Insert, cast_to, erase_unused
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.passes.attention.score_layout import are_equal

aten = torch.ops.aten

_EMPTY = (aten.new_empty_strided.default, aten.new_empty.default, aten.empty_like.default)


@dataclass(frozen=True)
class BiasGradient:
    """The nodes from the gradient of the scores to the sum over the batch.

    Attributes:
        d_scores: The gradient, [B, H, S, T].
        adds: Additions of the gradients of other attentions.
        total: The sum.
    """

    d_scores: fx.Node
    adds: tuple[fx.Node, ...]
    total: fx.Node

    @property
    def readers(self) -> tuple[fx.Node, ...]:
        """The node that reads `d_scores`."""
        return (*self.adds, self.total)[:1]

    def put(self, gradient: fx.Node, insert: Insert) -> None:
        """Take `gradient` [H, S, T] for this attention's part of the sum."""
        total, dims = self.total, self.total.args[1:]
        with total.graph.inserting_after(total):
            one = insert(aten.unsqueeze.default, (gradient, 0), {}, like=total)
        with total.graph.inserting_after(one):
            part = insert(aten.sum.dim_IntList, (one, *dims), {}, like=total)
        with total.graph.inserting_after(part):
            part = cast_to(part, fake_of(total).dtype, like=total)
        if not self.adds:
            total.replace_all_uses_with(part)
            erase_unused(total)
            return
        first = self.adds[0]
        others = [operand for operand in first.args if operand is not self.d_scores]
        first.replace_all_uses_with(others[0])  # type: ignore[arg-type]  # both operands are nodes
        with total.graph.inserting_after(part):
            both = insert(aten.add.Tensor, (total, part), {}, like=total)
        total.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
        erase_unused(first)


@dataclass(frozen=True)
class OneSequence:
    """The gradient of scores [1, H, S, T] as that of a bias, and the nodes that read it as such."""

    d_scores: fx.Node
    readers: tuple[fx.Node, ...]

    def put(self, gradient: fx.Node, insert: Insert) -> None:
        """Take `gradient` [H, S, T] for that of the scores."""
        with gradient.graph.inserting_after(gradient):
            whole = insert(aten.unsqueeze.default, (gradient, 0), {}, like=self.d_scores)
        with gradient.graph.inserting_after(whole):
            whole = cast_to(whole, fake_of(self.d_scores).dtype, like=self.d_scores)
        self.d_scores.replace_all_uses_with(whole, delete_user_cb=lambda user: user in self.readers)


def of_one_sequence(d_scores: fx.Node, readers: tuple[fx.Node, ...], batch_dims: tuple[Any, ...]) -> OneSequence | None:
    """The gradient of a bias, if the scores are those of one sequence."""
    is_one = len(batch_dims) == 2 and batch_dims[0] == 1 and fake_of(d_scores).dim() == 4
    return OneSequence(d_scores, readers) if is_one and fake_of(d_scores).is_contiguous() else None


def bias_gradient(d_scores: fx.Node, reader: fx.Node, batch_dims: tuple[Any, ...]) -> BiasGradient | None:
    """The gradient of a bias, if `reader` sums the gradient of scores over the batch, maybe with those of others."""
    shape, adds, node = fake_of(d_scores).shape, list[fx.Node](), reader
    if len(batch_dims) != 2 or len(shape) != 4:
        return None
    while node.target is aten.add.Tensor and not node.kwargs and _are_alike(node, shape) and len(node.users) == 1:
        adds.append(node)
        node = next(iter(node.users))
    if node.target is not aten.sum.dim_IntList or node.kwargs or not _is_over_batch(node):
        return None
    return BiasGradient(d_scores, tuple(adds), node)


def _are_alike(add: fx.Node, shape: torch.Size) -> bool:
    """Whether an addition has two different operands of this shape."""
    one, other = add.args[:2]
    both = isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other
    return both and all(are_equal(fake_of(x).shape, shape) for x in (one, other, add))  # type: ignore[arg-type]


def _is_over_batch(total: fx.Node) -> bool:
    return any(dim % 4 == 0 for dim in total.args[1])  # type: ignore[union-attr, operator]  # a list of numbers


def reads_shape_alone(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node reads no values of another: autograd copies gradients over new or overwritten memory.

    That is the backward of `scores += mask`.
    """
    if user.target in _EMPTY:
        return True
    if user.target is not aten.copy.default:
        return False
    target, source = user.args[:2]
    is_whole = isinstance(source, fx.Node) and are_equal(fake_of(user).shape, fake_of(source).shape)
    return target is node and source is not node and is_whole
