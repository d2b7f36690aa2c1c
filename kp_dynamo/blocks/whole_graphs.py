"""Prepares a graph to be divided, unless it must stay whole, whatever repeats in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from kp_dynamo.blocks.copies import copied
from kp_dynamo.blocks.own_masks import with_own_masks
from kp_dynamo.blocks.regions import changes_other_state, regions
from kp_dynamo.blocks.symbolic_sizes import has_sizes, is_size_arithmetic, reason_against_sizes
from kp_dynamo.blocks.traced_values import are_cast_otherwise, as_traced
from kp_dynamo.capture.capture import Capture

CALLS = ("call_function", "call_method")


def to_divide(capture: Capture) -> Capture | str:
    """A copy of a capture that can be divided, should a part of it repeat, or why it cannot.

    Each call of the copy computes the sizes and the causal mask that it reads, and its values have the dtypes of our
    trace.
    """
    reason = _reason_to_keep_whole(capture)
    if reason is not None:
        return reason
    if has_sizes(capture.gm.graph):
        capture = replace(capture, gm=copied(capture.gm, is_size_arithmetic))
    capture = with_own_masks(capture)
    return as_traced(capture) if are_cast_otherwise(capture) else capture


def _reason_to_keep_whole(capture: Capture) -> str | None:
    """Why a graph cannot be divided; None if it can."""
    graph = capture.gm.graph
    if capture.held or [*capture.gm.parameters(), *capture.gm.buffers()]:
        return "it holds tensors itself, as a compiled optimizer does"
    if any(node.op == "call_module" for node in graph.nodes):
        return "it calls whole modules"
    reason = reason_against_sizes(graph)
    if reason is not None:
        return reason
    nodes = [node for node in graph.nodes if node.op in CALLS]
    if any("as_strided" in str(getattr(node.target, "__name__", node.target)) for node in nodes):
        return "as_strided reads elements of its operand's storage, which another piece may not have"
    outside = (node for node, region in zip(nodes, regions(nodes), strict=False) if not region.level)
    state = next((node for node in outside if changes_other_state(node)), None)
    if state is not None:
        return f"{getattr(state.target, '__name__', state.target)} changes a state that pieces would not share"
    results: Any = graph.output_node().args[0]
    if any(isinstance(r, fx.Node) and r.op not in (*CALLS, "placeholder") for r in results):
        return "a result is an attribute of the graph"
    return None
