"""How an operator hands on a value of which each chip has a part, if it needs no communication for that.

Another operand that every chip has whole is no obstacle: each chip takes the part that it needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.reshapes import reshaped_dim, transposed_order

aten = torch.ops.aten


@dataclass(frozen=True)
class Divided:
    """A value of which each chip has a part; of several results of an operator, each.

    Attributes:
        dim: The dimension that is divided.
        columns: The column matmuls that it comes from.
    """

    dim: int
    columns: frozenset[fx.Node]

    def dim_of(self, operand: fx.Node, result: fx.Node) -> int | None:
        """The dimension of an operand that an elementwise operator divides with its result; None if it is whole."""
        shape, whole = _shape(operand), _shape(result)
        if shape is None or whole is None or not _is_elementwise(result):
            return None
        dim = self.dim + len(shape) - len(whole)
        return dim if dim >= 0 and shape[dim] == whole[self.dim] else None


def divided_result(node: fx.Node, values: Mapping[fx.Node, Divided], count: int) -> Divided | None:
    """What a node computes; None if its chips cannot compute their parts alone.

    Args:
        node: It reads a divided value.
        values: The divided values.
        count: The number of chips.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    if node.op != "call_function":
        return None
    rule = _elementwise if _is_elementwise(node) else _RULES.get(packet)
    operands = [n for n in node.all_input_nodes if n in values]
    dim = rule(node, {n: values[n].dim for n in operands}, count) if rule is not None else None
    return None if dim is None else Divided(dim, frozenset().union(*(values[n].columns for n in operands)))


_Dims = Mapping[fx.Node, int]


def _is_elementwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _elementwise(node: fx.Node, dims: _Dims, count: int) -> int | None:
    """Operands are aligned at their last dimension."""
    whole = _shape(node)
    if whole is None:
        return None
    shapes = {n: _shape(n) for n in dims}
    found = {dim + len(whole) - len(shape) for n, dim in dims.items() if (shape := shapes[n]) is not None}
    return found.pop() if len(found) == 1 else None


def _kept(node: fx.Node, dims: _Dims, count: int) -> int | None:
    """The result has the dimensions of its first operand."""
    return next(iter(dims.values())) if list(dims) == [node.args[0]] else None


def _reshape(node: fx.Node, dims: _Dims, count: int) -> int | None:
    source, shape = _shape(node.args[0]), _shape(node)
    if source is None or shape is None:
        return None
    return reshaped_dim(source, dims[node.args[0]], shape, count)  # type: ignore[index]  # a node


def _transpose(node: fx.Node, dims: _Dims, count: int) -> int | None:
    return transposed_order(node).index(dims[node.args[0]])  # type: ignore[index]  # a node


def _expand(node: fx.Node, dims: _Dims, count: int) -> int | None:
    source, shape = _shape(node.args[0]), _shape(node)
    if source is None or shape is None:
        return None
    return dims[node.args[0]] + len(shape) - len(source)  # type: ignore[index]  # a node


def _along(default: int | None) -> Callable[[fx.Node, _Dims, int], int | None]:
    """An operator that works along one dimension, which its second argument or one behind it names."""

    def rule(node: fx.Node, dims: _Dims, count: int) -> int | None:
        (dim, *others) = set(dims.values())
        rank = len(_shape(next(iter(dims))) or ())
        along = _argument(node, "dim", default)
        return None if others or not isinstance(along, int) or along % rank == dim else dim

    return rule


def _select(node: fx.Node, dims: _Dims, count: int) -> int | None:
    dim, along = dims[node.args[0]], _argument(node, "dim", None)  # type: ignore[index]  # a node
    rank = len(_shape(node.args[0]) or ())
    if not isinstance(along, int) or along % rank == dim:
        return None
    return dim - (along % rank < dim)


def _reduction(node: fx.Node, dims: _Dims, count: int) -> int | None:
    source, shape = _shape(node.args[0]), _shape(node)
    along = _argument(node, "dim", None)
    given = [along] if isinstance(along, int) else along
    if source is None or shape is None or not isinstance(given, (list, tuple)) or not given:
        return None
    dim, reduced = dims[node.args[0]], {d % len(source) for d in given}  # type: ignore[index]  # a node
    if dim in reduced:
        return None
    return dim if len(shape) == len(source) else dim - sum(d < dim for d in reduced)


def _layer_norm(node: fx.Node, dims: _Dims, count: int) -> int | None:
    rank, normalized = len(_shape(node.args[0]) or ()), node.args[1]
    dim = dims.get(node.args[0])  # type: ignore[arg-type]  # a node
    return dim if dim is not None and dim < rank - len(normalized) else None  # type: ignore[arg-type]  # a list


def _matmul(node: fx.Node, dims: _Dims, count: int) -> int | None:
    """Rows of the first operand, columns of the second, or batches of either."""
    left, right = (dims.get(n) for n in node.args[:2])  # type: ignore[arg-type]  # nodes
    rank = len(_shape(node) or ())
    found = {dim for dim in (left, right) if dim is not None}
    if len(found) != 1 or (left is not None and left == rank - 1) or (right is not None and right == rank - 2):
        return None
    is_both = left is not None and right is not None
    return None if is_both and left != 0 else found.pop()


def _item(node: fx.Node, dims: _Dims, count: int) -> int | None:
    shape, dim = _shape(node), dims[node.args[0]]  # type: ignore[index]  # a node
    return dim if shape is not None and dim < len(shape) else None


_RULES: dict[Any, Callable[[fx.Node, _Dims, int], int | None]] = {
    operator.getitem: _item,
    **dict.fromkeys((aten.clone, aten.alias, aten.detach, aten._to_copy, aten.full_like, aten.zeros_like), _kept),
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze), _reshape),
    **dict.fromkeys((aten.t, aten.transpose, aten.permute), _transpose),
    aten.expand: _expand,
    **dict.fromkeys((aten.slice, aten.split, aten.split_with_sizes, aten.cat), _along(0)),
    **dict.fromkeys((aten.cumsum, aten._softmax, aten._log_softmax), _along(None)),
    aten.select: _select,
    **dict.fromkeys((aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all, aten.var), _reduction),
    aten.native_layer_norm: _layer_norm,
    **dict.fromkeys((aten.mm, aten.bmm), _matmul),
}


def _argument(node: fx.Node, name: str, default: Any) -> Any:
    """An argument by its name in the schema; reductions call it "dim" in all their overloads."""
    if name in node.kwargs:
        return node.kwargs[name]
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]  # an ATen overload
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else default


def _shape(node: Any) -> tuple[int, ...] | None:
    value = tensor_of(node)
    is_static = value is not None and all(isinstance(size, int) for size in value.shape)
    return tuple(value.shape) if is_static else None  # type: ignore[union-attr]  # a tensor
