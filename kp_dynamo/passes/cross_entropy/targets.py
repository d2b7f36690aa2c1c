"""Matches what reads the target class of each row: `nll_loss`, `gather` or an index. Does not edit the graph.

1. nll_loss_forward(log_softmax(logits), target)
2. -log_softmax(logits).gather(-1, target[..., None])
3. -log_softmax(logits)[arange(N), target]
4. logsumexp(logits, -1) - logits.gather(-1, target[..., None])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.graph.op_tables import RESHAPES, SAME_ELEMENTS
from kp_dynamo.passes.attention.score_layout import are_equal
from kp_dynamo.passes.constants.values import constant_of

aten = torch.ops.aten

_NO_REDUCTION = 0
_SIGNS_AND_VIEWS = (*RESHAPES, *SAME_ELEMENTS, aten.neg.default)
_SCATTERS = (aten.scatter_add.default, aten.index_put.default)


@dataclass(frozen=True)
class Targets:
    """The reader of a head's targets.

    Attributes:
        reader: The call of nll_loss_forward, gather or index.
        log_softmax: The log probabilities that it reads; None if it reads the logits themselves.
        between: The nodes from the log probabilities to the reader: views and changes of the sign.
        index: The targets, one for each row.
        class_weights: The weight of each class, or None.
        reduction: As in nll_loss_forward: 0 is "none", 1 is "mean", 2 is "sum".
        ignored: The target of rows that do not count; None if each row counts.
    """

    reader: fx.Node
    log_softmax: fx.Node | None
    between: tuple[fx.Node, ...]
    index: fx.Node
    class_weights: fx.Node | None = None
    reduction: int = _NO_REDUCTION
    ignored: int | None = None

    @property
    def is_pick(self) -> bool:
        """Whether the reader picks one value of each row, without a reduction of its own."""
        return self.reader.target is not aten.nll_loss_forward.default

    @property
    def sign(self) -> int:
        """The sign of the log probabilities, or of the logits, that the reader picks."""
        return sign_of(self.between)

    @property
    def logits(self) -> fx.Node:
        """The logits of the rows."""
        if self.log_softmax is not None:
            return self.log_softmax.args[0]  # type: ignore[return-value]  # it is a tensor
        return self.reader.args[0]  # type: ignore[return-value]


def sign_of(nodes: tuple[fx.Node, ...]) -> int:
    return -1 if sum(node.target is aten.neg.default for node in nodes) % 2 else 1


def targets_of(reader: fx.Node) -> Targets | None:
    """The targets that a node reads; None if it reads neither log probabilities nor one value of each row."""
    if reader.target is aten.nll_loss_forward.default:
        log_softmax, index, class_weights, reduction, ignored = reader.args
        if not _is_log_softmax(log_softmax) or fake_of(log_softmax).dim() != 2:  # type: ignore[arg-type]
            return None
        return Targets(reader, log_softmax, (), index, class_weights, reduction, ignored)  # type: ignore[arg-type]
    index = picked_index(reader)
    if index is None:
        return None
    between, node = signs_and_views(reader.args[0])
    if not _is_log_softmax(node):
        return Targets(reader, None, (), index)
    return Targets(reader, node, between, index)


def signs_and_views(node: Any) -> tuple[tuple[fx.Node, ...], Any]:
    """The views and changes of the sign up from `node`, in forward order, and what they begin with."""
    nodes: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target in _SIGNS_AND_VIEWS:
        nodes.append(node)
        node = node.args[0]
    return tuple(reversed(nodes)), node


def picked_index(node: fx.Node) -> fx.Node | None:
    """The index by which a gather or an index picks one value of each row, or None."""
    if node.target is aten.gather.default:
        source, dim, index = node.args[:3]
        is_one = _has_one_column(index, source) and dim in (-1, fake_of(source).dim() - 1)  # type: ignore[arg-type]
        return index if is_one else None  # type: ignore[return-value]
    if node.target is not aten.index.Tensor:
        return None
    source, indices = node.args[:2]
    return _index_of_rows(indices, source)


def scattered(node: Any, index: fx.Node) -> fx.Node | None:
    """The values that a node, the gradient of such a reader, adds to zeros at the same places; None for others."""
    if not isinstance(node, fx.Node) or node.target not in _SCATTERS:
        return None
    zeros = constant_of(node.args[0])
    if zeros is None or zeros.value != 0:
        return None
    if node.target is aten.scatter_add.default:
        _, dim, at, values = node.args
        is_alike = at is index and dim in (-1, fake_of(node).dim() - 1) and _has_one_column(values, node)
    else:
        _, indices, values = node.args[:3]
        is_alike = node.args[3:] == (True,) and _index_of_rows(indices, node) is index
        is_alike = is_alike and are_equal(fake_of(values).shape, fake_of(index).shape)  # type: ignore[arg-type]
    return values if is_alike else None  # type: ignore[return-value]


def _is_log_softmax(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten._log_softmax.default:
        return False
    return node.args[1] in (-1, fake_of(node).dim() - 1)


def _has_one_column(node: Any, rows: Any) -> bool:
    """Whether a node has one number for each row, [..., 1], of rows [..., V]."""
    one, other = tensor_of(node), tensor_of(rows)
    if one is None or other is None or one.dim() != other.dim() or one.dim() < 2 or one.shape[-1] != 1:
        return False
    return are_equal(one.shape[:-1], other.shape[:-1])


def _index_of_rows(indices: Any, source: Any) -> fx.Node | None:
    """The second of the indices [arange(N), target] of a matrix of N rows, or None."""
    value = tensor_of(source)
    if value is None or value.dim() != 2 or len(indices) != 2:
        return None
    rows, target = indices
    is_every_row = _is_arange(rows) and are_equal(fake_of(rows).shape, value.shape[:1])
    is_one_each = isinstance(target, fx.Node) and are_equal(fake_of(target).shape, value.shape[:1])
    is_number = is_one_each and not fake_of(target).dtype.is_floating_point and fake_of(target).dtype != torch.bool
    return target if is_every_row and is_number else None


def _is_arange(node: Any) -> bool:
    """Whether a node is 0, 1, 2, ..."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.arange.default:
        return True
    is_from_0 = node.target in (aten.arange.start, aten.arange.start_step) and bool(node.args[0] == 0)
    return is_from_0 and node.args[2:] in ((), (1,))
