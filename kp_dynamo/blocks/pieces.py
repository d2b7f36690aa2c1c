"""A stretch of Dynamo's graph as a graph of its own, and the fake tensors that stand for its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from kp_dynamo.blocks.regions import EXIT_AUTOCAST, SET_GRAD, Region


def piece_graph(
    gm: fx.GraphModule,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    around: tuple[Region, Region],
) -> fx.GraphModule:
    """The calls `nodes` of `gm` as a graph from `inputs` to `outputs`.

    Args:
        gm: Dynamo's graph.
        nodes: Consecutive calls.
        inputs: The nodes outside that they read.
        outputs: Those of `nodes` whose values are used outside.
        around: The state of autocast and grad mode before and after `nodes`.
    """
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {node: _placeholder(graph, node) for node in inputs}
    before, after = around
    for entered in before.autocasts:
        new[entered] = graph.node_copy(entered)
    if before.grad != torch.is_grad_enabled():
        graph.call_function(SET_GRAD, (before.grad,))
    for node in nodes:
        for attribute in (n for n in node.all_input_nodes if n.op == "get_attr" and n not in new):
            new[attribute] = graph.node_copy(attribute)
        new[node] = graph.node_copy(node, new.__getitem__)
    if after.grad != torch.is_grad_enabled():
        # A compiled graph leaves the grad mode of its caller as it was.
        graph.call_function(SET_GRAD, (torch.is_grad_enabled(),))
    for entered in reversed(after.autocasts):
        graph.call_function(EXIT_AUTOCAST, (new[entered],))
    graph.output(tuple(new[node] for node in outputs))
    piece = fx.GraphModule(gm, graph)
    piece.meta.update(gm.meta)
    piece._param_name_to_source = {}  # type: ignore[assignment]
    return piece


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    new = graph.placeholder(node.name)
    new.meta.update(node.meta)
    # AOTAutograd reads the source of every input of a graph.
    new._dynamo_source = getattr(node, "_dynamo_source", None) or ConstantSource(node.name)
    return new


def input_like(node: fx.Node) -> torch.Tensor:
    """A fake CPU tensor for a value that another piece computes.

    A backend is called after Dynamo has replaced its fake mode: the fake tensors in `meta` belong to the old one.
    """
    value: torch.Tensor = node.meta["example_value"]
    with fake_mode():
        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        if not value.requires_grad:
            return fake
        leaf = fake.requires_grad_()
        with torch.enable_grad():
            return leaf.clone()  # the result of an operator, which may be written to


def fake_mode() -> FakeTensorMode:
    """The fake mode in which AOTAutograd traces."""
    mode = TracingContext.get().fake_mode
    assert mode is not None, "Dynamo has a fake mode when it calls a backend"
    return mode
