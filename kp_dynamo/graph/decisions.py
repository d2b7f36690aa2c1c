"""What the forward decides of its values, such as which one is the largest, the backward does not decide otherwise.

The partitioner recomputes what is cheap, but XLA does not compute a value equally in two programs: where a fusion
permits, it keeps more precision than bfloat16 has, or contracts a product and a sum. If `x.amax(-1)` is saved and x is
recomputed, no element of x may equal it.

Like `save_unrepeatable`, this belongs to a call of the partitioner, and is no pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.nodes import backward_nodes, forward_nodes, tensor_of
from kp_dynamo.graph.op_tables import VIEWS_AND_CASTS

_aten = torch.ops.aten
_EQUALITIES = (_aten.eq.Tensor, _aten.ne.Tensor)
# Their results are numbers of the operand, to which their gradients compare it.
_EXTREMES = (
    _aten.linalg_vector_norm.default,
    _aten.amax.default,
    _aten.amin.default,
    _aten.max.default,
    _aten.min.default,
    _aten.median.default,
    _aten.nanmedian.default,
    _aten.scatter_reduce.two,
    _aten.index_reduce.default,
)
_COMPARISONS = (
    *_EQUALITIES, _aten.lt.Tensor, _aten.le.Tensor, _aten.gt.Tensor, _aten.ge.Tensor,
)  # fmt: skip
_WITH_NUMBER = (
    _aten.eq.Scalar, _aten.ne.Scalar, _aten.lt.Scalar, _aten.le.Scalar, _aten.gt.Scalar, _aten.ge.Scalar,
)  # fmt: skip
_PLACES = (_aten.argmax.default, _aten.argmin.default)
_READS = (_aten.gather.default, _aten.index_select.default)


def decide_once(graph: fx.Graph) -> None:
    """Tag decisions of a joint graph: comparisons of two computed tensors, or of their difference with a number.

    What the forward decides is saved, places of extremes too. What only gradients decide cannot be saved: the gradients
    of `amax`, `vector_norm(inf)` and others go to the elements that equal the result, and are divided by their number.
    There the result is always recomputed, from the values that the backward reads.
    """
    backward, forward = backward_nodes(graph), forward_nodes(graph)
    for node in graph.nodes:
        if node in forward and _is_decision(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif node not in backward and node.target in _EQUALITIES:
            for found in (n for operand in node.all_input_nodes for n in _extreme(operand)):
                found.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
                found.meta.setdefault("ac_graph_id", 0)


def _is_decision(node: fx.Node) -> bool:
    if node.target in _PLACES:
        return True
    read: Any = node.args[0] if node.target in _WITH_NUMBER else node
    is_comparison = node.target in _COMPARISONS or (read is not node and read.target is _aten.sub.Tensor)
    return is_comparison and all(map(_is_computed, read.args[:2]))


def _is_computed(node: Any) -> bool:
    """Whether it is floats, and not an input or the view or cast of one: those are equal in every program."""
    value = tensor_of(node)
    if value is None or not value.is_floating_point():
        return False
    while node.target in VIEWS_AND_CASTS:
        node = node.all_input_nodes[0]
    return bool(node.op == "call_function")


def _extreme(node: fx.Node) -> list[fx.Node]:
    """The extreme that a value is read from, with all that reads it and masks its operand; nothing if it is another."""
    path = [node]
    while path[-1].target not in _EXTREMES:
        if not _is_read(path[-1]):
            return []
        path.append(path[-1].all_input_nodes[0])  # the tensor stands before sizes and indices
    values = path[-1].args[:1]  # a padded operand is saved with more precision than the backward reads it with
    while isinstance(value := values[0], fx.Node) and (value.target is _aten.where.self or _is_read(value)):
        path.append(value)
        values = value.args[1:2] if value.target is _aten.where.self else value.args[:1]
    return path


def _is_read(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or node.target in _READS)
