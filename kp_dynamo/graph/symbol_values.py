"""The values of a graph's size symbols in one call, read from the call's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch

Values = Mapping[sympy.Symbol, int]
Size = int | torch.SymInt


class SymbolReader:
    """Reads the values of a graph's symbols from its arguments.

    Args:
        inputs: The values of the graph's placeholders, in order: fake tensors and symbolic numbers.
        has_strides: Whether the arguments have the strides of `inputs`. XLA tensors do not: they are always contiguous.
            A symbol that is a size is always read from the size.
    """

    def __init__(self, inputs: Sequence[Any], *, has_strides: bool = True) -> None:
        self._readers: dict[sympy.Symbol, tuple[int, Callable[[Any], Any]]] = {}
        for parts in (_sizes, _strides) if has_strides else (_sizes,):
            for position, value in enumerate(inputs):
                for size, reader in parts(value):
                    if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                        self._readers.setdefault(size.node.expr, (position, reader))

    def read(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """Symbol -> its value in a call with these arguments."""
        return {symbol: int(reader(args[i])) for symbol, (i, reader) in self._readers.items()}


def _sizes(value: Any) -> list[tuple[Any, Callable[[Any], Any]]]:
    if not isinstance(value, torch.Tensor):
        return [(value, lambda number: number)]
    if value.layout is not torch.strided:
        return []
    return [(size, partial(_size, dim)) for dim, size in enumerate(value.shape)]


def _strides(value: Any) -> list[tuple[Any, Callable[[Any], Any]]]:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return []
    steps = [(step, partial(_stride, dim)) for dim, step in enumerate(value.stride())]
    return [*steps, (value.storage_offset(), torch.Tensor.storage_offset)]


def _size(dim: int, tensor: torch.Tensor) -> int:
    return tensor.shape[dim]


def _stride(dim: int, tensor: torch.Tensor) -> int:
    return tensor.stride(dim)


def evaluated(size: Any, values: Values) -> Any:
    """A symbolic size as a number; any other value unchanged.

    Raises:
        KeyError: No argument determines one of its symbols.
    """
    if not isinstance(size, torch.SymInt):
        return size
    # torch's own Max and Min do not accept Python numbers.
    number = size.node.expr.xreplace({symbol: sympy.Integer(value) for symbol, value in values.items()})
    if number.free_symbols:
        raise KeyError(str(number))
    return int(number)
