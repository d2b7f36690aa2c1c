"""What else lies otherwise in memory where one value of a graph does."""

from __future__ import annotations

import torch
from torch import fx

from kp_dynamo.passes.base import tensor_of
from kp_dynamo.passes.insertion import FakeRuns
from kp_dynamo.passes.sensitive_ops import PARTS, PRODUCTS, VIEWS

aten = torch.ops.aten


def is_seen(node: fx.Node) -> bool:
    """Whether a value, or one that may take its strides from it, is a result of the graph."""
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
    return (node.target not in PRODUCTS and tensor_of(node) is not None) or node.target in VIEWS + PARTS


def update_strides(node: fx.Node) -> None:
    """Give those behind a value the strides that they have now; a view that fails on them becomes a reshape."""
    runs, changed = FakeRuns(), {node}
    follower = node.next
    while follower.op != "root":
        if follower.op == "call_function" and changed.intersection(follower.all_input_nodes):
            before = tensor_of(follower)
            if follower.target in (aten.view.default, aten._unsafe_view.default):
                _make_possible(follower)
            runs.set_value(follower)
            after = tensor_of(follower)
            if before is None or after is None or before.stride() != after.stride():
                changed.add(follower)
        follower = follower.next


def _make_possible(view: fx.Node) -> None:
    source = tensor_of(view.args[0])
    assert source is not None, "a view is of a tensor"
    if not source.is_contiguous():
        view.target = aten.reshape.default
