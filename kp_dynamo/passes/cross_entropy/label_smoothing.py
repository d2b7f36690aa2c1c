"""Matches the sum of the log probabilities of each row that label smoothing adds to a loss, and its gradient.

F.cross_entropy with label_smoothing computes, besides the negative log likelihood of the targets, the sum of
`class weight * log probability` over the classes of a row (without class weights, of the log probabilities).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import RESHAPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Smoothing:
    """The sum over the classes of a row.

    Attributes:
        reader: The reader of the log probabilities: the sum, or the product with the class weights before it.
        total: The sum, [N].
        weights: The view [1, V] of the class weights; None if the loss has no class weights.
    """

    reader: fx.Node
    total: fx.Node
    weights: fx.Node | None = None


def smoothing_of(log_softmax: fx.Node, class_weights: fx.Node | None) -> Smoothing | None:
    """The sum of label smoothing that reads `log_softmax`, with the class weights [V] of the loss; None if none is."""
    for user in log_softmax.users:
        if class_weights is None and _sums_rows(user):
            return Smoothing(user, user)
        weights = _other_factor(user, log_softmax)
        if weights is not None and _is_row_of(weights, class_weights) and len(user.users) == 1:
            (total,) = user.users
            if _sums_rows(total):
                return Smoothing(user, total, weights)
    return None


def split_gradient(gradient: fx.Node, smoothing: Smoothing | None) -> tuple[fx.Node, fx.Node | None] | None:
    """The gradient of the log probabilities: aten.nll_loss_backward, and the gradient of the sum, [N, 1].

    None if the gradient has other parts or other readers.
    """
    if gradient.target is aten.nll_loss_backward.default:
        return (gradient, None) if len(gradient.users) == 1 else None
    if smoothing is None or gradient.target is not aten.add.Tensor or len(gradient.users) != 1 or gradient.kwargs:
        return None
    one, two = gradient.args
    loss, other = (one, two) if getattr(one, "target", None) is aten.nll_loss_backward.default else (two, one)
    if not isinstance(loss, fx.Node) or loss.target is not aten.nll_loss_backward.default or len(loss.users) != 1:
        return None
    rows = _rows_of(other, smoothing)
    return None if rows is None else (loss, rows)


def _rows_of(gradient: object, smoothing: Smoothing) -> fx.Node | None:
    """What is expanded over the classes to give the gradient of the sum, [N, 1]."""
    if not isinstance(gradient, fx.Node):
        return None
    if smoothing.weights is not None:
        expanded = _other_factor(gradient, smoothing.weights)
        return None if expanded is None else _rows_of(expanded, Smoothing(smoothing.reader, smoothing.total))
    if gradient.target is not aten.expand.default:
        return None
    rows = gradient.args[0]
    return rows if tuple(fake_of(rows).shape) == (fake_of(smoothing.total).shape[0], 1) else None  # type: ignore[arg-type,return-value]


def _sums_rows(node: fx.Node) -> bool:
    if node.target is not aten.sum.dim_IntList or node.kwargs:
        return False
    value = fake_of(node.args[0])  # type: ignore[arg-type]
    return value.dim() == 2 and len(node.args) == 2 and list(node.args[1]) in ([1], [-1])  # type: ignore[arg-type]


def _other_factor(product: fx.Node, factor: fx.Node) -> fx.Node | None:
    """The operand of a multiplication beside `factor`."""
    if product.target is not aten.mul.Tensor or factor not in product.args:
        return None
    one, two = product.args
    other = two if one is factor else one
    return other if isinstance(other, fx.Node) and other is not factor else None


def _is_row_of(node: fx.Node, class_weights: fx.Node | None) -> bool:
    """Whether a node is the class weights [V] as one row [1, V]."""
    if class_weights is None or node.target not in (*RESHAPES, aten.unsqueeze.default):
        return False
    return node.args[0] is class_weights and tuple(fake_of(node).shape) == (1, *fake_of(class_weights).shape)
