"""Replaces constants of a tensor's shape by constants without the tensor: `full_like(x, 0.0)` -> `full([2, 3], 0.0)`.

The value of `x` does not matter, but the graph has the dependency. Common subexpression elimination merges equal
`full_like` of two layers, which then makes the later layer's backward depend on a value of the earlier one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.editing import insert_call, replace_node
from kp_dynamo.graph.nodes import calls, tensor_of
from kp_dynamo.passes.constants.values import constant_of

aten = torch.ops.aten

_SOURCES = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)


def drop_shape_sources(graph: fx.Graph) -> int:
    """Rewrite constants of a static shape; return how many."""
    found = [(n, c) for n in calls(graph, *_SOURCES) if (c := constant_of(n)) is not None and _is_static(n)]
    for node, constant in found:
        result = node.meta["val"]
        with graph.inserting_before(node):
            arguments = (list(result.shape), constant.value)
            made = insert_call(graph, aten.full.default, arguments, _like(result), like=node, value=result)
        replace_node(node, made)
    return len(found)


def _is_static(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and all(isinstance(size, int) for size in value.shape)


def _like(result: torch.Tensor) -> dict[str, Any]:
    return {"dtype": result.dtype, "layout": result.layout, "device": torch.device("cpu"), "pin_memory": False}
