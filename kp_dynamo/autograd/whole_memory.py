"""Overlapping arguments, one of which the graph writes to: AOTAutograd passes the memory that they share instead.

The graph is traced for the part of that memory that the arguments cover, or for its whole size at the first call. A
call passes the whole memory, whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def with_whole_memory(
    run: Callable[[list[Any]], list[Any]], gm: fx.GraphModule, overwritten: Sequence[int | None]
) -> Callable[[list[Any]], list[Any]]:
    """`run` on as much of each vector as the graph was traced for; the rest is returned unchanged.

    Args:
        run: The compiled `gm`; takes its arguments in a list.
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
                results[position] = _write_over(given[number], results[position])
        return results

    return called


def _resized(memory: torch.Tensor, length: int) -> torch.Tensor:
    """`memory` truncated to `length`, or extended by zeros, which no argument reads."""
    missing = length - memory.shape[0]
    return torch.cat([memory, memory.new_zeros(missing)]) if missing > 0 else memory[:length]


def _write_over(memory: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`memory` with `new` written over its start, truncated to the size of `memory`."""
    return torch.cat([new, memory[new.shape[0] :]])[: memory.shape[0]]


def _length(node: fx.Node) -> int | None:
    """The length of a vector of static size; None for other inputs."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 1:
        return None
    return value.shape[0] if isinstance(value.shape[0], int) else None
