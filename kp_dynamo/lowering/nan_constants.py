"""Results that are NaN whatever the arguments are, such as x * nan: constants of a program.

XLA:CPU computes exp with a conversion to integers, which is undefined for NaN. Where LLVM knows that a value is NaN, as
that of x * nan, it drops exp, and the result is whatever was in memory. XLA itself computes exp of a constant, and that
is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.op_tables import VIEWS_AND_CASTS

aten = torch.ops.aten

_ARITHMETIC = (
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.add.Scalar,
    aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
)  # fmt: skip
_MADE = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
_SAME = (*VIEWS_AND_CASTS, aten.expand.default, aten.clone.default, aten.neg.default)


class NanForms:
    """The forms of a graph's operations whose results are NaN throughout."""

    def __init__(self, graph: fx.Graph) -> None:
        self._nan: set[fx.Node] = set()
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point() and self._becomes_nan(node):
                self._nan.add(node)

    def _becomes_nan(self, node: fx.Node) -> bool:
        if node.target in _MADE:
            return any(_is_nan(value) for value in node.args)
        if node.target in _ARITHMETIC:
            return any(self._is_nan(value) for value in node.args[:2])
        return node.target in _SAME and self._is_nan(node.args[0])

    def _is_nan(self, value: Any) -> bool:
        return value in self._nan if isinstance(value, fx.Node) else _is_nan(value)

    def form_of(self, node: fx.Node) -> Callable[..., Any] | None:
        """The form of an operation whose result is NaN throughout; None for other nodes."""
        if node not in self._nan or node.target not in _ARITHMETIC:
            return None
        dtype = node.meta["val"].dtype

        def form(x: Any, y: Any, *_: Any, **__: Any) -> torch.Tensor:
            tensors = [value for value in (x, y) if isinstance(value, torch.Tensor)]
            shape = torch.broadcast_shapes(*(value.shape for value in tensors))
            return torch.full(shape, math.nan, dtype=dtype, device=tensors[0].device)

        return form


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
