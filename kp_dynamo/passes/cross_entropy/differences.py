"""Differences of a row's log-sum-exp and the logit of its target: losses, and what their gradients leave of others.

With the gradients d, `loss = lse - logit` has d_lse = d_loss + d_others and d_logit = -d_loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import RESHAPES, SAME_ELEMENTS
from kp_dynamo.passes.attention.score_layout import are_equal
from kp_dynamo.passes.cross_entropy.gradients import Part

aten = torch.ops.aten

_ROW_VIEWS = (
    *RESHAPES, *SAME_ELEMENTS, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
)  # fmt: skip


def losses_of(pick: fx.Node, log_totals: tuple[fx.Node, ...], forward: set[fx.Node]) -> tuple[tuple[fx.Node, int], ...]:
    """The differences of a log-sum-exp and a picked logit, with the sign: 1 for a loss, -1 for a log probability."""
    found = []
    for picked in _views_of(pick, forward):
        for user in picked.users:
            if user not in forward or user.target is not aten.sub.Tensor or user.kwargs or len(set(user.args)) != 2:
                continue
            one, two = user.args
            other = one if two is picked else two
            if _origin(other)[0] in log_totals and _are_alike(user, picked, other):  # type: ignore[arg-type]
                found.append((user, 1 if two is picked else -1))
    return tuple(found)


def rest_of(loss: Part | None, log_totals: tuple[Part, ...]) -> tuple[Part, ...]:
    """What the gradients of log-sum-exps are besides the gradient of the loss that picks a logit.

    The gradient of a difference reaches both of its operands, so it cancels, term by term where the terms are known.
    """
    if loss is None:
        return log_totals
    source, sign = _origin(loss.rows)
    terms = [(term, part) for part in log_totals for term in _terms(part.rows)]
    for number, (term, _) in enumerate(terms):
        if _origin(term) == (source, -sign):
            return tuple(Part(part.d_logits, (), other) for other, part in terms[:number] + terms[number + 1 :])
    # The operator adds the softmax times the gradient of the loss, which is the negative of this one.
    return (*log_totals, Part(loss.d_logits, (), loss.rows))


def _terms(rows: fx.Node) -> list[fx.Node]:
    """The terms of a sum of gradients of the same shape."""
    views, node = [], rows
    while node.target in _ROW_VIEWS:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not aten.add.Tensor or node.kwargs or not all(isinstance(a, fx.Node) for a in node.args):
        return [rows]
    if not all(are_equal(fake_of(a).shape, fake_of(node).shape) for a in node.args):  # type: ignore[arg-type]
        return [rows]
    return [term for operand in node.args for term in _terms(operand)]  # type: ignore[arg-type]


def _origin(node: Any) -> tuple[Any, int]:
    """What a node is a view of, and the sign of the node."""
    sign = 1
    while isinstance(node, fx.Node) and node.target in (*_ROW_VIEWS, aten.neg.default):
        sign = -sign if node.target is aten.neg.default else sign
        node = node.args[0]
    return node, sign


def _views_of(node: fx.Node, forward: set[fx.Node]) -> Iterator[fx.Node]:
    yield node
    for user in node.users:
        if user in forward and user.target in _ROW_VIEWS:
            yield from _views_of(user, forward)


def _are_alike(*nodes: fx.Node) -> bool:
    return all(are_equal(fake_of(node).shape, fake_of(nodes[0]).shape) for node in nodes)
