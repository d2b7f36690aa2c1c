"""The bounds of docs/correctness.md for one graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from kp_dynamo.passes.base import Errors

FLOAT32_ERROR = 1e-5
"""What a result may be off without a narrower dtype."""
SHARE = 1.1
"""What a graph may be off, as a multiple of eager's error."""


def bounds(eager: Errors, counts: tuple[int, int], rounding: float) -> Errors:
    """The bounds of results and gradients.

    The error of few numbers is chance: that of n independent roundings varies by 1/sqrt(n) of itself, and one rounding
    may be off by half a unit in the last place although eager's is exact.

    Args:
        eager: The error of eager in the dtypes that the graph may use.
        counts: How many numbers there are in the results and in the gradients.
        rounding: Half a unit in the last place of the narrowest of these dtypes.
    """

    def bound(error: float | None, count: int) -> float | None:
        if error is None:
            return None
        return max(FLOAT32_ERROR, SHARE * error + (error + rounding) / math.sqrt(max(count, 1)))

    return Errors(bound(eager.results, counts[0]), bound(eager.gradients, counts[1]))


def rounding_of(graph: fx.Graph) -> float:
    """Half a unit in the last place of the narrowest floating-point dtype of a graph."""
    return max((torch.finfo(dtype).eps / 2 for dtype in _float_dtypes(graph)), default=0.0)


def has_narrow(graph: fx.Graph) -> bool:
    """Whether a graph computes in a dtype narrower than float32."""
    return any(dtype.itemsize < torch.float32.itemsize for dtype in _float_dtypes(graph))


def _float_dtypes(graph: fx.Graph) -> set[torch.dtype]:
    return {value.dtype for value in _values(graph) if value.is_floating_point()}


def _values(graph: fx.Graph) -> Iterator[torch.Tensor]:
    for node in graph.nodes:
        value: Any = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        yield from (v for v in values if isinstance(v, torch.Tensor))
