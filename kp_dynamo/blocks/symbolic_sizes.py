"""Sizes that vary from call to call: what of them a piece takes as inputs, and which graphs stay whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def is_size_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes a size from sizes only, so that each of its users can compute it again."""
    is_call = node.op == "call_function" and _is_size(node)
    return is_call and all(map(_is_size, node.all_input_nodes))


def has_sizes(graph: fx.Graph) -> bool:
    """Whether sizes vary; Dynamo makes an input of each."""
    return any(map(_is_size, graph.nodes))


def reason_against_sizes(graph: fx.Graph) -> str | None:
    """Why the numbers in a graph keep it whole; None if every one is a size that follows from sizes of the inputs."""
    if any(isinstance(_value(node), (torch.SymFloat, torch.SymBool)) for node in graph.nodes):
        return "it computes with numbers that vary from call to call and are not sizes"
    defined = _defining(graph.find_nodes(op="placeholder"))
    if not symbols_of(graph.nodes) <= defined.keys():
        return "a size depends on the values of a tensor, or is not an input"
    results: Any = graph.output_node().args[0]
    if any(isinstance(r, fx.Node) and r.op != "placeholder" and _is_size(r) for r in results):
        return "it returns a size that it computes"
    return None


def symbols_of(nodes: Iterable[fx.Node]) -> set[sympy.Symbol]:
    """The symbols in the values of nodes: in numbers, shapes, strides and storage offsets."""
    return {symbol for node in nodes for value in tree_leaves(_value(node)) for symbol in _symbols(value)}


def sizes_for(inputs: Sequence[fx.Node], symbols: set[sympy.Symbol]) -> list[fx.Node]:
    """The inputs of the whole graph that are these symbols."""
    return [node for symbol, node in _defining(inputs).items() if symbol in symbols]


def _defining(inputs: Iterable[fx.Node]) -> dict[sympy.Symbol, fx.Node]:
    sizes = ((node, _value(node)) for node in inputs if _is_size(node))
    return {value.node.expr: node for node, value in sizes if value.node.expr.is_Symbol}


def _symbols(value: Any) -> set[sympy.Symbol]:
    if isinstance(value, _NUMBERS):
        return set(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return set()
    if not value._has_symbolic_sizes_strides:
        return set()
    parts = (*value.shape, *value.stride(), value.storage_offset())
    return {symbol for part in parts if isinstance(part, torch.SymInt) for symbol in part.node.expr.free_symbols}


def _is_size(node: fx.Node) -> bool:
    return isinstance(_value(node), torch.SymInt)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")
