"""Graphs that are not divided, whatever repeats in them, and why."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from kp_dynamo.blocks.regions import changes_other_state, regions
from kp_dynamo.capture.capture import Capture

CALLS = ("call_function", "call_method")
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def reason_to_keep_whole(capture: Capture) -> str | None:
    """Why a graph cannot be divided; None if it can, should a part of it repeat."""
    graph = capture.gm.graph
    if capture.held or [*capture.gm.parameters(), *capture.gm.buffers()]:
        return "it holds tensors itself, as a compiled optimizer does"
    if any(node.op == "call_module" for node in graph.nodes):
        return "it calls whole modules"
    if any(isinstance(node.meta.get("example_value"), _NUMBERS) for node in graph.nodes):
        return "it computes with sizes or numbers that vary from call to call"
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
