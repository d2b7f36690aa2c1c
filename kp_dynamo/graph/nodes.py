"""Node queries that several packages share, and the keys in `meta` through which they exchange data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

PADDED_SIZES = "kp_padded_sizes"
"""Key in the meta of a graph that `mask_padding` has padded: the expressions of its padded sizes."""
EAGER_STRIDES = "eager_strides"
"""Key in the meta of the output node: position of a result -> its strides in eager."""


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor a node stands for, or None if its value is not a single tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def called_name(node: fx.Node) -> str:
    """The name of the function or method that a node of Dynamo's graph calls; "" if it has none."""
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def fake_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node whose value is known to be a single tensor."""
    value = tensor_of(node)
    assert value is not None, f"{node} is a tensor"
    return value


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is an incoming gradient of a joint or backward graph: AOTAutograd names them `tangents_*`."""
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def primal_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a joint or inference graph that are arguments of the function, not incoming gradients."""
    return [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]


def inputs_by_position(graph: fx.Graph) -> dict[int, fx.Node]:
    """The inputs of a joint or inference graph, by the positions of the arguments of Dynamo's graph that they are.

    AOTAutograd may have removed some, or put them in another order.
    """
    found = {getattr(node.meta.get("desc"), "idx", None): node for node in primal_inputs(graph)}
    return {position: node for position, node in found.items() if position is not None}


def gradients_by_position(joint: fx.Graph) -> dict[int, fx.Node]:
    """The results of a joint graph that are gradients, by the positions of the arguments; any other graph has none."""
    if not any(map(is_tangent, joint.find_nodes(op="placeholder"))):
        return {}
    gradients = gradients_by_input(joint)
    return {i: gradients[node] for i, node in inputs_by_position(joint).items() if node in gradients}


def gradients_by_input(joint: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The gradient of each input of a joint graph that has one: the last results are those of all inputs, or None."""
    results, inputs = joint.output_node().args[0], primal_inputs(joint)
    assert isinstance(results, (list, tuple))
    pairs = zip(inputs, results[len(results) - len(inputs) :], strict=True)
    return {node: gradient for node, gradient in pairs if isinstance(gradient, fx.Node)}


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of a joint graph that depend on an incoming gradient."""
    found = {node for node in graph.find_nodes(op="placeholder") if is_tangent(node)}
    if not found:  # an inference graph: several passes ask
        return found
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {node for node in found if node.op != "output"}


def forward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that an output of the forward needs; in a joint graph the others only feed gradients."""
    backward = backward_nodes(graph)
    results = graph.output_node().all_input_nodes
    found: set[fx.Node] = set()
    stack = [node for node in results if node not in backward]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def calls(graph: fx.Graph, *targets: object) -> Iterator[fx.Node]:
    """The call nodes of `targets` in graph order, from a snapshot: the graph may be edited meanwhile."""
    return (n for n in list(graph.nodes) if n.op == "call_function" and n.target in targets)


def called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The result of a call of Dynamo's graph, a function or a method, for these operands."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function's target is one
