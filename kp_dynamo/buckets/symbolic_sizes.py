"""The symbolic sizes of a capture: where they are read from, and what shapes they give at known lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

Lengths = dict[sympy.Symbol, int]
Shape = tuple[int, ...]


def example_value(node: Any) -> Any:
    """Dynamo's fake value of a node; None for an argument that is no node."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def is_symbolic(size: Any) -> bool:
    """Whether a size depends on a symbol; a SymInt may also hold a constant."""
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols)


def first_places(inputs: Sequence[Any]) -> dict[sympy.Symbol, tuple[int, int]]:
    """Symbol of a length -> the input and dimension it is read from."""
    found: dict[sympy.Symbol, tuple[int, int]] = {}
    for position, value in enumerate(inputs):
        for d, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (position, d))
    return found


def changes(values: Sequence[Any], source: Lengths, target: Lengths) -> tuple[tuple[int, Shape | float], ...]:
    """(position, shape or number) of the values that differ between two sets of lengths."""
    pairs = [(i, _at(v, source), _at(v, target)) for i, v in enumerate(values)]
    return tuple((i, new) for i, old, new in pairs if new is not None and new != old)


def _at(value: Any, lengths: Lengths) -> Shape | float | None:
    """The shape of a tensor, or a symbolic number, at given lengths; None if they do not depend on a length."""
    if isinstance(value, torch.SymInt) and not value.node.expr.free_symbols <= lengths.keys():  # an input's stride
        return None
    for symbolic, number in ((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool)):
        if isinstance(value, symbolic):
            return number(evaluated(value.node.expr, lengths))
    if isinstance(value, torch.Tensor):
        return tuple(
            int(evaluated(s.node.expr, lengths)) if isinstance(s, torch.SymInt) else int(s) for s in value.shape
        )
    return None


def upper_bound(environment: Any, symbol: sympy.Symbol) -> int | None:
    """The largest size that the model's guards allow; None if they do not bound it."""
    bound = environment.bound_sympy(symbol).upper
    return int(bound) if bound.is_Integer and int(bound) < 2**31 else None


def evaluated(expr: sympy.Basic, lengths: Lengths) -> Any:
    """`expr` with numbers in place of the symbols."""
    return expr.xreplace({s: sympy.Integer(n) for s, n in lengths.items()})
