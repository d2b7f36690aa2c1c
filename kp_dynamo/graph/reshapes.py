"""Which dimensions of a tensor become which ones in a reshape or a transpose."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of

aten = torch.ops.aten


def transposed_order(node: fx.Node) -> list[int]:
    """For each dimension of the result of `t`, `transpose` or `permute`, that of the operand."""
    rank = fake_of(node).dim()
    packet, order = getattr(node.target, "overloadpacket", None), list(range(rank))
    if packet is aten.permute:
        dims: Any = node.args[1]
        return [dim % rank for dim in dims]
    a, b = (0, rank - 1) if packet is aten.t else (int(node.args[1]), int(node.args[2]))  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


def reshaped_dim(source: tuple[int, ...], dim: int, shape: tuple[int, ...], count: int) -> int | None:
    """The dimension after a reshape whose `count` equal parts hold the same elements as those of `dim` before it.

    None if there is no such dimension. Where a reshape joins dimensions or takes one apart, only the outermost can be
    divided.
    """
    for old, new in groups_of_dims(source, shape):
        first = next((i for i in old if source[i] != 1), None)
        target = next((i for i in new if shape[i] != 1), None)
        if first == dim:
            return target if target is not None and shape[target] % count == 0 else None
    return None


def groups_of_dims(source: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest groups of dimensions before and after a reshape that have the same number of elements."""
    i = j = 0
    while i < len(source) or j < len(shape):
        old, new = [i] if i < len(source) else [], [j] if j < len(shape) else []
        i, j = i + 1, j + 1
        while (before := prod(source[d] for d in old)) != (after := prod(shape[d] for d in new)):
            if before < after and i < len(source):
                old.append(i)
                i += 1
            elif j < len(shape):
                new.append(j)
                j += 1
            else:
                return  # sizes of 0 or symbols: nothing is known
        yield old, new
