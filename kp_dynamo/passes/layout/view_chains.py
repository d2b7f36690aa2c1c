"""Follows a value back or forward through views, permutations and casts. Does not edit the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import PERMUTATIONS, RESHAPES
from kp_dynamo.passes.layout.axes import Axes, Dims
from kp_dynamo.passes.precision.cast_nodes import is_upcast

aten = torch.ops.aten

_COPIES = (aten.clone.default, aten.alias.default, aten.detach.default)


@dataclass(frozen=True)
class End:
    """One end of a chain of moves.

    Attributes:
        node: The value there.
        dims: Its dimensions, in the axes of the value at the other end.
        upcasts: The casts to float32 in between, in graph order.
    """

    node: fx.Node
    dims: Dims
    upcasts: tuple[fx.Node, ...] = ()


def source_of(node: fx.Node, dims: Dims, axes: Axes) -> End:
    """The value that `node` views, permutes and upcasts, as far back as possible."""
    upcasts: list[fx.Node] = []
    while node.op == "call_function":
        source: Any = node.args[0] if node.args else None
        if is_upcast(node):
            upcasts.insert(0, node)
        elif node.target in PERMUTATIONS:
            order = _order(node)
            dims = tuple(dims[order.index(dim)] for dim in range(len(order)))
        elif node.target in RESHAPES and has_static_size(source):
            before = axes.viewed(dims, source.meta["val"].shape)
            if before is None:
                break
            dims = before
        elif node.target not in _COPIES:
            break
        node = source
    return End(node, dims, tuple(upcasts))


def destination_of(node: fx.Node, dims: Dims, axes: Axes) -> End:
    """The value that `node` becomes through views, permutations and upcasts, as long as it has one reader."""
    upcasts: list[fx.Node] = []
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.op != "call_function":
            break
        if is_upcast(user):
            upcasts.append(user)
        elif user.target in PERMUTATIONS:
            dims = tuple(dims[dim] for dim in _order(user))
        elif user.target in RESHAPES and has_static_size(user):
            after = axes.viewed(dims, user.meta["val"].shape)
            if after is None:
                break
            dims = after
        elif user.target not in _COPIES:
            break
        node = user
    return End(node, dims, tuple(upcasts))


def has_static_size(node: object) -> bool:
    """Whether a node is a tensor with static sizes and at least one element."""
    value = tensor_of(node)
    return value is not None and all(isinstance(size, int) and size > 0 for size in value.shape)


def _order(node: fx.Node) -> list[int]:
    """For each dimension of a permutation, the dimension of the source."""
    rank = node.meta["val"].dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in node.args[1]]  # type: ignore[union-attr]  # a list of numbers
    order = list(range(rank))
    one, other = (0, 1) if node.target is aten.t.default else node.args[1:3]
    if rank > 1:
        order[one], order[other] = order[other], order[one]  # type: ignore[index]  # numbers
    return order
