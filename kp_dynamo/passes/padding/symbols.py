"""The symbols of a graph's inputs: those that are lengths, and numbers that vary without being one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from kp_dynamo.passes.base import Refusal


def symbol_named(name: str, inputs: Sequence[fx.Node]) -> sympy.Symbol:
    """The symbol of that name among the sizes of the inputs; a new symbol if a guard has specialized the size."""
    for symbol in _symbols(inputs):
        if str(symbol) == name:
            return symbol
    return sympy.Symbol(name)


def sizes_of(values: Sequence[Any]) -> dict[sympy.Symbol, torch.SymInt]:
    """Maps each symbol to the size of an input."""
    found: dict[sympy.Symbol, torch.SymInt] = {}
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, size)
    return found


def _symbols(inputs: Sequence[fx.Node]) -> set[sympy.Symbol]:
    found: set[sympy.Symbol] = set()
    for node in inputs:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else [value]
        for size in sizes:
            if isinstance(size, (torch.SymInt, torch.SymFloat)):
                found |= size.node.expr.free_symbols
    return found


def varying_number(inputs: Sequence[fx.Node], symbols: Sequence[str]) -> Refusal | None:
    """A used input that varies and is no padded size, or None."""
    for node in inputs:
        unknown = {str(s) for s in _symbols([node])} - set(symbols)
        # Dynamo also passes the strides and storage offsets of inputs, which a functional graph does not use.
        if unknown and node.users:
            return Refusal(
                node,
                f"the number {_user_names(node, unknown)} varies and is not a padded size. Try: pass it as a "
                "tensor and use it in a mask or an index (torch.where, x.scatter)",
            )
    return None


def _user_names(node: fx.Node, names: set[str]) -> str:
    """The numbers by their names in the user's code, if Dynamo knows them: "start", "self.step"."""
    value = node.meta.get("val")
    sources = getattr(getattr(getattr(value, "node", None), "shape_env", None), "var_to_sources", {})
    found = {str(symbol): known[0].name() for symbol, known in sources.items() if known}
    return ", ".join(re.sub(r"L\['(\w+)'\]", r"\1", found.get(name, name)) for name in sorted(names))
