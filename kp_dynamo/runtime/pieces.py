"""Values on the way between the pieces of a divided graph that records no gradient, and back to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.compat import xla
from kp_dynamo.graph.symbol_values import SymbolReader
from kp_dynamo.lowering.host_layout import Strides, strides_of, to_host

_MAX_LAYOUTS = 4096  # a few hundred bytes each


def taking_from_device(run: Callable[..., Any], passed: frozenset[int]) -> Callable[..., Any]:
    """`run`, whose arguments at the positions `passed` are on the device when it is called.

    They are there already, unless a piece returned a view of a CPU tensor of the caller.
    """

    def called(*args: Any) -> Any:
        if any(args[i].device.type == "cpu" for i in passed):
            args = tuple(a.to(xla.device()) if i in passed else a for i, a in enumerate(args))
        return run(*args)

    return called


def returning_to_host(run: Callable[..., Any], inputs: Sequence[Any], eager: Sequence[Any]) -> Callable[..., Any]:
    """`run`, which records no gradient, with the results that it leaves on the device moved to the CPU.

    Args:
        run: The whole graph.
        inputs: Fake tensors of its inputs, and its symbolic sizes.
        eager: Fake tensors of its results with eager's strides.
    """
    reader = SymbolReader(inputs)
    layouts: LRUCache[tuple[int, ...], list[Strides]] = LRUCache(_MAX_LAYOUTS)

    def strides_for(args: Sequence[Any]) -> list[Strides]:
        symbols = reader.read(args)
        key = tuple(symbols.values())
        found = layouts.get(key)
        if found is None:
            found = [strides_of(value, symbols) for value in eager]
            layouts.set(key, found)
        return found

    def called(*args: Any) -> list[Any]:
        strides = strides_for(args)
        results = list(run(*args))
        # Views of the caller's CPU tensors are there already. Copies of them are too, with the strides of the original.
        made = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor) and not _is_view_of_one(r, args)]
        moved = to_host([results[i] for i in made], [strides[i] for i in made])
        for position, result in zip(made, moved, strict=True):
            results[position] = result
        return results

    return called


def _is_view_of_one(result: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether a result is on the CPU and shares memory with an argument."""
    if result.device.type != "cpu":
        return False
    memory = result.untyped_storage().data_ptr()
    return any(isinstance(a, torch.Tensor) and a.device.type == "cpu" and _memory(a) == memory for a in args)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
