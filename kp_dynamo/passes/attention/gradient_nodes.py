"""Single nodes of the backward of an attention: transposed operands, and masks of a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from kp_dynamo.graph.op_tables import SAME_ELEMENTS
from kp_dynamo.passes.constants.values import constant_of

aten = torch.ops.aten

Choice = tuple[fx.Node, bool]
"""A boolean mask, without its views, and its value where a score stays."""


def transposes(node: fx.Node) -> Iterator[fx.Node]:
    """The readers of a node that swap its last two of three dimensions."""
    return (user for user in node.users if is_transposed(user, node))


def is_transposed(node: object, source: object) -> bool:
    """Whether a node is `source` with its last two of three dimensions swapped."""
    if not isinstance(node, fx.Node) or not node.args or node.args[0] is not source:
        return False
    if node.target is aten.transpose.int:
        return {d % 3 for d in node.args[1:3]} == {1, 2}  # type: ignore[operator]  # dimensions are numbers
    return node.target is aten.permute.default and list(node.args[1]) == [0, 2, 1]  # type: ignore[arg-type]


def choice_of(user: fx.Node, node: fx.Node) -> Choice | None:
    """The mask of a node that sets parts of a gradient to zero, or None."""
    if user.target is aten.masked_fill.Scalar and user.args[0] is node and _is_zero(user.args[2]):
        return unviewed(user.args[1]), False
    if user.target is not aten.where.self:
        return None
    condition, one, other = user.args
    if one is node and _is_zero(other):
        return unviewed(condition), True
    return (unviewed(condition), False) if other is node and _is_zero(one) else None


def _is_zero(argument: object) -> bool:
    constant = constant_of(argument)
    return constant is not None and constant.value == 0


def unviewed(node: object) -> fx.Node:
    """A mask without the views that change nothing: a transposed mask is another one."""
    while isinstance(node, fx.Node) and node.target in SAME_ELEMENTS:
        node = node.args[0]
    assert isinstance(node, fx.Node), "a mask is a tensor"
    return node
