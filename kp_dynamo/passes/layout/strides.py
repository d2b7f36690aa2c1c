"""Keeps strides correct while passes change layouts, and restores those of outputs, which callers see."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from kp_dynamo.graph.editing import FakeRuns, set_value
from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import MATMULS

aten = torch.ops.aten


def result_values(graph: fx.Graph) -> list[torch.Tensor | None]:
    """The fake tensors of a graph's outputs."""
    return [tensor_of(result) for result in _results(graph)]


def keep_strides(graph: fx.Graph, before: list[torch.Tensor | None]) -> None:
    """Restore the strides that outputs had before the passes ran: those of eager, which callers see.

    A program has no strides. A result gets its strides when it is copied to the host.

    This is no pass: it compares the graph after all passes, the user's included, with the graph before them, and no
    option may disable it. It changes no node, only what a node says of its strides.
    """
    for node, value in zip(_results(graph), before, strict=True):
        now = tensor_of(node)
        if value is None or now is None or (now.shape, now.dtype) != (value.shape, value.dtype):
            continue
        if now.stride() != value.stride():
            set_value(node, value)


def _results(graph: fx.Graph) -> list[fx.Node]:
    return pytree.tree_leaves(graph.output_node().args[0], is_leaf=lambda x: x is None)


def is_seen(node: fx.Node) -> bool:
    """Whether an output of the graph is this value, or may inherit its strides.

    Outputs keep their strides in any case, see `keep_strides`; other strides would cost a copy on the way to the
    caller.
    """
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user.op == "output":
                return True
            if user not in found and _may_take_strides(user):
                found.add(user)
                stack.append(user)
    return False


def _may_take_strides(node: fx.Node) -> bool:
    return node.target not in MATMULS


class Strides:
    """Updates strides while a pass walks a graph in order and changes the strides of some values.

    A single sweep: propagating each change on its own would walk a model of many blocks once per matmul.
    """

    def __init__(self) -> None:
        self.runs = FakeRuns()
        self._changed: set[fx.Node] = set()

    def changed(self, node: fx.Node, before: torch.Tensor) -> None:
        """Record that `node` replaces `before`."""
        if node.meta["val"].stride() != before.stride():
            self._changed.add(node)

    def update(self, node: fx.Node) -> None:
        """Recompute the strides of a node whose operands changed; a view that would fail becomes a reshape."""
        if node.op != "call_function" or self._changed.isdisjoint(node.all_input_nodes):
            return
        before = tensor_of(node)
        if node.target in (aten.view.default, aten._unsafe_view.default):
            _make_possible(node)
        self.runs.set_value(node)
        after = tensor_of(node)
        if before is None or after is None or before.stride() != after.stride():
            self._changed.add(node)


def _make_possible(view: fx.Node) -> None:
    source = tensor_of(view.args[0])
    assert source is not None, "a view is of a tensor"
    if not source.is_contiguous():
        view.target = aten.reshape.default
