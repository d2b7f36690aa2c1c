"""Replaces 0-dim constants by Python numbers: `mul(x, full([], 2.0))` -> `mul(x, 2.0)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.editing import erase_unused, insert_call
from kp_dynamo.graph.nodes import calls, fake_of, tensor_of
from kp_dynamo.graph.op_tables import FILLS
from kp_dynamo.passes.constants.values import constant_of

aten = torch.ops.aten

# If the constant is the last tensor operand: a Tensor overload accepts a number, or a Scalar overload exists.
_LAST: dict[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor, aten.sub.Tensor: aten.sub.Tensor,
    aten.mul.Tensor: aten.mul.Tensor, aten.div.Tensor: aten.div.Tensor,
    aten.eq.Tensor: aten.eq.Scalar, aten.ne.Tensor: aten.ne.Scalar,
    aten.lt.Tensor: aten.lt.Scalar, aten.le.Tensor: aten.le.Scalar,
    aten.gt.Tensor: aten.gt.Scalar, aten.ge.Tensor: aten.ge.Scalar,
    aten.fill.Tensor: aten.fill.Scalar, aten.masked_fill.Tensor: aten.masked_fill.Scalar,
}  # fmt: skip
# If it is the first of two: the call that takes (tensor, number). Other ops have none.
_FIRST: dict[Any, Any] = {
    aten.add.Tensor: aten.add.Tensor, aten.mul.Tensor: aten.mul.Tensor, aten.sub.Tensor: aten.rsub.Scalar,
    aten.eq.Tensor: aten.eq.Scalar, aten.ne.Tensor: aten.ne.Scalar,
    aten.lt.Tensor: aten.gt.Scalar, aten.le.Tensor: aten.ge.Scalar,
    aten.gt.Tensor: aten.lt.Scalar, aten.ge.Tensor: aten.le.Scalar,
}  # fmt: skip


def use_scalars(graph: fx.Graph) -> int:
    """Replace 0-dim constants by numbers in the ops that accept one with the same result; return how many.

    The result is the same if the other operand is of the constant's kind (integer or floating), the number is exact in
    its dtype, and the result keeps its dtype (a 0-dim float64 promotes another 0-dim tensor, a number does not).
    """
    rewritten = 0
    for constant in calls(graph, *FILLS):
        number = _number(constant)
        if number is not None:
            users = [user for user in list(constant.users) if _use_scalar(user, constant, number)]
            for user in users:
                erase_unused(user)
            rewritten += len(users)
    return rewritten


def _number(constant: fx.Node) -> int | float | None:
    """The value of a 0-dim integer or floating constant."""
    value, known = tensor_of(constant), constant_of(constant)
    if value is None or value.dim() or known is None or isinstance(known.value, bool | complex):
        return None
    return known.value


def _use_scalar(user: fx.Node, constant: fx.Node, number: int | float) -> bool:
    """Replace `user` by a call that takes the number; False if the result would differ."""
    call = _scalar_call(user, constant, number)
    other, wanted = tensor_of(call[1][0]) if call else None, tensor_of(user)
    if call is None or other is None or wanted is None or not _is_exact(number, fake_of(constant).dtype, other.dtype):
        return False
    with user.graph.inserting_before(user):
        made = insert_call(user.graph, *call, user.kwargs, like=user)
    if fake_of(made).dtype != wanted.dtype:
        user.graph.erase_node(made)
        return False
    user.replace_all_uses_with(made)
    return True


def _scalar_call(user: fx.Node, constant: fx.Node, number: int | float) -> tuple[Any, tuple[Any, ...]] | None:
    """The target and arguments of `user` with the number in place of the constant, or None."""
    if user.target in _LAST and user.args[-1] is constant:
        return _LAST[user.target], (*user.args[:-1], number)
    if user.target in _FIRST and user.args[0] is constant and not user.kwargs:
        return _FIRST[user.target], (user.args[1], number)
    return None


def _is_exact(number: int | float, dtype: torch.dtype, other: torch.dtype) -> bool:
    is_same_kind = dtype.is_floating_point == other.is_floating_point and not other.is_complex and other != torch.bool
    return is_same_kind and torch.tensor(number, dtype=dtype).to(other).item() == number
