"""Reads the constants of a graph: the number that an argument is, as its dtype represents it.

`full([], 2.7, dtype=int64)` is 2, `full([], 300, dtype=bool)` is True, and `scalar_tensor(0.1, dtype=bfloat16)` is
0.10009765625. A pass that reads the argument of the creation op gets 2.7, 300 and 0.1, which the program never uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import DIVISIONS, MULTIPLICATIONS

aten = torch.ops.aten

Number = bool | int | float | complex

MAX_FACTOR = 1e3
"""The largest factor of scores or logits that a fused operator applies itself.

XLA computes them again where it subtracts their maximum, and rounds them differently: scores of 1e10 by hundreds, whose
exponential is infinite. A factor that stays an operator of the graph, or is one of queries or keys, rounds once.
"""

# Creation ops that fill a tensor, and the position of the fill value among their arguments.
_POSITIONS: dict[Any, int] = {
    aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0,
}  # fmt: skip
_VALUES: dict[Any, Number] = {
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0,
    aten.ones.default: 1, aten.ones_like.default: 1, aten.new_ones.default: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Constant:
    """A number of a graph.

    Attributes:
        value: The number, as `dtype` represents it.
        dtype: The dtype of the tensor filled with it; None for a Python number, which only promotes the kind of a
            dtype.
    """

    value: Number
    dtype: torch.dtype | None

    @property
    def is_real(self) -> bool:
        """Whether it is not complex; True counts as 1."""
        return not isinstance(self.value, complex)

    def as_float(self, dtype: torch.dtype) -> float:
        """The number cast to a floating-point dtype; infinite if out of range, as in a cast of tensors."""
        with _disable_current_modes():
            return float(torch.tensor(self.value, dtype=self.dtype or torch.float64).to(dtype).item())


def constant_of(argument: object) -> Constant | None:
    """The number that an argument is, or that a node is filled with; None for all others."""
    if isinstance(argument, Number):
        return Constant(argument, None)
    result = tensor_of(argument)
    if result is None or not isinstance(argument, fx.Node):
        return None
    number = _created_from(argument)
    if not isinstance(number, Number):
        return None
    try:
        with _disable_current_modes():
            return Constant(torch.full((), number, dtype=result.dtype).item(), result.dtype)
    except RuntimeError:  # the creation op raises when it runs: out of the range of its dtype
        return None


def factor_of(node: fx.Node) -> float | None:
    """The one number that a node multiplies its first operand by; None for other nodes, and for 0, inf and NaN."""
    if node.target not in MULTIPLICATIONS + DIVISIONS or len(node.args) != 2 or node.kwargs:
        return None
    constant = constant_of(node.args[1])
    if constant is None or not constant.is_real or not _is_as_large(node, node.args[0]):
        return None
    number = float(constant.value)  # type: ignore[arg-type]  # it is real
    if number == 0 or not math.isfinite(number):
        return None
    return 1 / number if node.target in DIVISIONS else number


def _created_from(node: fx.Node) -> object:
    if node.target in _VALUES:
        return _VALUES[node.target]
    position = _POSITIONS.get(node.target)
    return None if position is None or len(node.args) <= position else node.args[position]


def _is_as_large(node: fx.Node, source: object) -> bool:
    """Whether the constant did not broadcast `source` to a larger shape."""
    one, other = tensor_of(node), tensor_of(source)
    if one is None or other is None or one.dim() != other.dim():
        return False
    return all(statically_known_true(a == b) for a, b in zip(one.shape, other.shape, strict=True))
