"""Matches the log-sum-exp of each row of the logits, as in a z-loss, and its gradient. Does not edit the graph.

With the gradients d, `lse = logsumexp(logits, -1)` has d_logits = d_lse[..., None] * exp(logits - lse[..., None]).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import RESHAPES
from kp_dynamo.passes.attention.score_layout import are_equal

aten = torch.ops.aten

_ROW_VIEWS = (*RESHAPES, aten.unsqueeze.default)


@dataclass(frozen=True)
class LogTotalGradient:
    """The gradient that a log-sum-exp sends to the logits.

    Attributes:
        d_logits: That gradient, [..., V].
        inside: The nodes that compute the probabilities for it.
        rows: The gradient of the log-sum-exp, [..., 1].
    """

    d_logits: fx.Node
    inside: tuple[fx.Node, ...]
    rows: fx.Node


def is_log_total(node: fx.Node) -> bool:
    """Whether a node is the log-sum-exp over the last dimension."""
    if node.target is not aten.logsumexp.default:
        return False
    return list(node.args[1]) in ([-1], [fake_of(node.args[0]).dim() - 1])  # type: ignore[arg-type]


def log_total_gradients(log_total: fx.Node) -> Iterator[LogTotalGradient]:
    """The gradients that a log-sum-exp sends to its logits."""
    logits = log_total.args[0]
    for column in _columns(log_total):
        for difference in column.users:
            if difference.target is not aten.sub.Tensor or difference.args != (logits, column) or difference.kwargs:
                continue
            for power in difference.users:
                if power.target is aten.exp.default:
                    yield from _multiplied(power, difference)


def _columns(log_total: fx.Node) -> Iterator[fx.Node]:
    """The log-sum-exp as [..., 1]."""
    shape = (*fake_of(log_total.args[0]).shape[:-1], 1)  # type: ignore[arg-type]
    candidates = [log_total, *(user for user in log_total.users if user.target in _ROW_VIEWS)]
    return (node for node in candidates if are_equal(fake_of(node).shape, shape))


def _multiplied(power: fx.Node, difference: fx.Node) -> Iterator[LogTotalGradient]:
    """The products of the probabilities with a gradient of each row."""
    shape = (*fake_of(power).shape[:-1], 1)
    for product in power.users:
        if product.target is not aten.mul.Tensor or len(set(product.args)) != 2:
            continue
        one, two = product.args
        rows = one if two is power else two
        if isinstance(rows, fx.Node) and are_equal(fake_of(rows).shape, shape):
            yield LogTotalGradient(product, (difference, power), rows)
