"""The pass `check_indices`."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operator
from kp_dynamo.graph.editing import FakeRuns, insert_call
from kp_dynamo.graph.nodes import calls, fake_of, forward_nodes, tensor_of
from kp_dynamo.graph.places import place_of
from kp_dynamo.passes.base import PassReport

aten, kp = torch.ops.aten, torch.ops.kp


class _Operands(NamedTuple):
    """The positions of an operator's indices and of the dimension they index, or that dimension itself."""

    indices: int
    dim_at: int | None = None
    dim: int = 0
    may_be_negative: bool = False


_OF_ROWS = _Operands(1)
_OF_A_DIM = _Operands(2, dim_at=1)
_INDEXED = {
    aten.embedding.default: _OF_ROWS,
    aten._embedding_bag.default: _OF_ROWS,
    aten._embedding_bag_forward_only.default: _OF_ROWS,
    aten.gather.default: _OF_A_DIM,
    aten.index_select.default: _OF_A_DIM,
    aten.index_add.default: _OF_A_DIM,
    aten.index_copy.default: _OF_A_DIM,
    aten.index_fill.int_Scalar: _Operands(2, dim_at=1, may_be_negative=True),
    aten.index_fill.int_Tensor: _Operands(2, dim_at=1, may_be_negative=True),
    aten.scatter.src: _OF_A_DIM,
    aten.scatter.value: _OF_A_DIM,
    aten.scatter_add.default: _OF_A_DIM,
    aten.scatter_reduce.two: _OF_A_DIM,
}
_LISTS = (aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor)
# (scores, target, weight, reduction, ignore_index): the classes are dimension 1.
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


@dataclass(frozen=True)
class CheckIndices:
    """Raise IndexError where the forward reads or writes with an index that is out of range.

        before                                            after
        embedding = aten.embedding.default(weight, ids)   checked = kp.check_indices(ids, 0, 50, None, "in embed")
                                                          embedding = aten.embedding.default(weight, checked)

    Fires on embeddings, gather, scatter, index_select and its relatives, advanced indexing, and the targets of
    nll_loss, which may be `ignore_index`. Masks of booleans are no indices. `take` and `put`, which flatten their
    operand, are not checked.
    """

    name: ClassVar[str] = "check_indices"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        forward, runs = forward_nodes(gm.graph), FakeRuns()
        nodes = [node for node in calls(gm.graph, *_INDEXED, *_LISTS, *_LOSSES) if node in forward]
        for node in nodes:
            with gm.graph.inserting_before(node):
                _check(gm.graph, node, runs)
        return PassReport(self.name, rewritten=len(nodes))


def _check(graph: fx.Graph, node: fx.Node, runs: FakeRuns) -> None:
    def checked(indices: Any, dim: int, *, ignored: int | None = None, may_be_negative: bool = False) -> Any:
        value = tensor_of(indices)
        if value is None or value.dtype not in (torch.int64, torch.int32):
            return indices
        size = _size(graph, node.args[0], dim, runs)  # type: ignore[arg-type]
        low = 0 if not may_be_negative else _negative(graph, size, runs)
        args = (indices, low, size, ignored, place_of(node).text(verbose=True) or str(node.target))
        return insert_call(graph, kp.check_indices.default, args, {}, like=node, runs=runs)

    if node.target in _LISTS:
        found = [checked(x, d, may_be_negative=True) for d, x in enumerate(node.args[1])]  # type: ignore[arg-type]
        node.update_arg(1, found)
    elif node.target in _LOSSES:
        node.update_arg(1, checked(node.args[1], 1, ignored=node.args[4]))  # type: ignore[arg-type]
    else:
        where = _INDEXED[node.target]  # type: ignore[index]
        dim = where.dim if where.dim_at is None else node.args[where.dim_at]
        made = checked(node.args[where.indices], dim, may_be_negative=where.may_be_negative)  # type: ignore[arg-type]
        node.update_arg(where.indices, made)


def _size(graph: fx.Graph, source: fx.Node, dim: int, runs: FakeRuns) -> Any:
    """The size of a dimension: a number, or a node if it is symbolic."""
    shape = fake_of(source).shape or (1,)
    size = shape[dim]
    if isinstance(size, int):
        return size
    return insert_call(graph, aten.sym_size.int, (source, dim % len(shape)), {}, like=source, runs=runs)


def _negative(graph: fx.Graph, size: Any, runs: FakeRuns) -> Any:
    if isinstance(size, int):
        return -size
    return insert_call(graph, operator.neg, (size,), {}, like=size, runs=runs)
