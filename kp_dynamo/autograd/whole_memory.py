"""Overlapping arguments of which one is written to: AOTAutograd puts the memory that they share in their place.

It traces for as much of that memory as there is at the first call, or as the arguments need, and hands over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def with_whole_memory(
    run: Callable[[list[Any]], list[Any]], gm: fx.GraphModule, overwritten: Sequence[int | None]
) -> Callable[[list[Any]], list[Any]]:
    """`run`, given as much of a vector as the graph was traced for; what lies behind it comes back as it was.

    Args:
        run: What runs `gm`; takes its arguments in a list.
        gm: A forward or inference graph.
        overwritten: The inputs that the first results are copied over.
    """
    every_length = enumerate(map(_length, gm.graph.find_nodes(op="placeholder")))
    lengths = {i: length for i, length in every_length if length is not None}

    def called(args: list[Any]) -> list[Any]:
        given = {i: args[i] for i, length in lengths.items() if args[i].shape[0] != length}
        for i, memory in given.items():
            args[i] = _resized(memory, lengths[i])
        results = list(run(args))
        for position, number in enumerate(overwritten):
            if number in given:
                results[position] = _over(given[number], results[position])
        return results

    return called


def _resized(memory: torch.Tensor, length: int) -> torch.Tensor:
    """The first part, or zeros behind it, which no argument reads."""
    missing = length - memory.shape[0]
    return torch.cat([memory, memory.new_zeros(missing)]) if missing > 0 else memory[:length]


def _over(memory: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What was written, in as much memory as there is."""
    return torch.cat([new, memory[new.shape[0] :]])[: memory.shape[0]]


def _length(node: fx.Node) -> int | None:
    """Of a vector whose size is a number."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return None
    return value.shape[0] if isinstance(value.shape[0], int) else None
