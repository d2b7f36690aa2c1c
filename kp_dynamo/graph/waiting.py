"""Values that wait for each other: `kp::optimization_barrier` and `kp::wait_for_all` in a graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.graph.editing import insert_call

kp = torch.ops.kp

WAITS = (kp.optimization_barrier.default, kp.wait_for_all.default)


def insert_wait(graph: fx.Graph, target: Any, values: Sequence[fx.Node]) -> list[fx.Node]:
    """The results of a wait for `values` at the insertion point; with a barrier, the last value is the signal."""
    fakes = [node.meta["val"] for node in values]
    args = ([*values],) if target is kp.wait_for_all.default else ([*values[:-1]], values[-1])
    wait = insert_call(graph, target, args, {}, like=None, value=fakes)
    return [
        insert_call(graph, operator.getitem, (wait, i), {}, like=node, value=node.meta["val"])
        for i, node in enumerate(values)
    ]


def waited_for(node: fx.Node) -> fx.Node | None:
    """The value that a result of a wait is; None if `node` is no such result."""
    source = node.args[0] if node.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source.target not in WAITS:
        return None
    return values_of(source)[cast("int", node.args[1])]


def values_of(wait: fx.Node) -> list[fx.Node]:
    """What a wait lets through, in the order of its results."""
    values, *signal = cast("Any", wait.args)
    return [*values, *signal]
