"""Hide constants from XLA, whose algebraic simplifier rounds where ATen does not.

XLA turns a division by a constant into a multiplication by its reciprocal, and it folds two added constants into one:

    41 / 41                  is 0.99999994 in XLA: its floor is 0, and `mean` of equal numbers is a different number
    (x + 2**23) - 2**23      is x in XLA, but ATen rounds to a whole number

The rules are `A / Const => A * (1 / Const)`, `(A + C1) + C2 => A + (C1 + C2)` and `(C1 - A) + C2` of XLA's
algebraic_simplifier.cc. Here such a constant is hidden from XLA:

TPU  by an optimization barrier, which is a scalar in the fusion;
CPU  by `where(x > inf, 0, constant)`, which LLVM simplifies to the constant. XLA:CPU drops barriers, and LLVM does not
     reassociate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.waiting import waited_for
from kp_dynamo.lowering.cast_forms import converted, wide
from kp_dynamo.ops.optimization_barrier import held, keeps_barriers

aten = torch.ops.aten

_DIVISIONS = (aten.div.Tensor, aten.div.Scalar)
_SUMS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar, aten.rsub.Tensor)
# XLA looks through these between two additions, or removes them.
_SEEN_THROUGH = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.slice.Tensor,
    aten.select.int, aten._to_copy.default, aten.contiguous.default,
)  # fmt: skip


def hidden(constant: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """`constant`, in a form whose value XLA does not know.

    Args:
        constant: A floating-point tensor.
        beside: A real floating-point tensor that broadcasts with `constant`. Its values do not matter.
    """
    if keeps_barriers():
        return held(constant)
    return torch.where(beside > math.inf, torch.zeros_like(constant), constant)


def divided(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor for a floating-point x, rounded once."""
    if _is_power_of_two(divisor):
        return x / divisor  # XLA's product with the reciprocal is exact, and the program is smaller
    return x / hidden(torch.full((), divisor, dtype=x.dtype, device=x.device), x)


def mean(x: torch.Tensor, dims: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """The mean over dimensions, as sum / count: the mean of equal numbers is that number."""
    total = x.sum(list(dims), keepdim) if dims else x
    return divided(total, math.prod(x.shape[d] for d in dims))


class ExactForms:
    """Exact forms of a graph's operations with constants: values that depend on none of its arguments."""

    def __init__(self, graph: fx.Graph) -> None:
        self._made: set[fx.Node] = set()
        for node in graph.nodes:
            is_tensor = node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
            if is_tensor and self._made.issuperset(node.all_input_nodes):
                self._made.add(node)

    def form_of(self, node: fx.Node) -> Callable[..., Any] | None:
        """The form of a division by a constant, or of an addition of a second constant; None for other nodes."""
        value = node.meta.get("val")
        if node.target not in (*_DIVISIONS, *_SUMS) or not isinstance(value, torch.Tensor):
            return None
        if not value.is_floating_point():
            return None
        first, second = node.args[0], node.args[1]
        if node.target in _DIVISIONS:
            return _division(value.dtype) if self._is_constant(second) and not _is_power_of_two(second) else None
        if self._is_constant(second) and self._adds_a_constant(first):
            return _sum(node.target, value.dtype, constant=1)
        is_turned = self._is_constant(first) and self._adds_a_constant(second)
        return _sum(node.target, value.dtype, constant=0) if is_turned else None

    def _is_constant(self, value: Any) -> bool:
        return value in self._made if isinstance(value, fx.Node) else isinstance(value, (int, float))

    def _adds_a_constant(self, value: Any) -> bool:
        """Whether a value is a sum with a constant, or a view of one."""
        while isinstance(value, fx.Node) and (value.target in _SEEN_THROUGH or waited_for(value) is not None):
            value = waited_for(value) or value.args[0]
        if not isinstance(value, fx.Node) or value.target not in _SUMS:
            return False
        return self._is_constant(value.args[0]) != self._is_constant(value.args[1])


def _division(dtype: torch.dtype) -> Callable[..., Any]:
    def form(x: torch.Tensor, y: Any) -> Any:
        x, y = _in(dtype, x), _in(dtype, y, like=x)
        return (x / hidden(y, x)).to(dtype)

    return form


def _sum(target: Any, dtype: torch.dtype, *, constant: int) -> Callable[..., Any]:
    sign_of = {aten.sub.Tensor: (1, -1), aten.sub.Scalar: (1, -1), aten.rsub.Scalar: (-1, 1), aten.rsub.Tensor: (-1, 1)}
    of_first, of_second = sign_of.get(target, (1, 1))

    def form(x: Any, y: Any, alpha: Any = 1) -> Any:
        like = x if isinstance(x, torch.Tensor) else y
        terms = [_in(dtype, x, like=like), _in(dtype, y, like=like)]
        scaled = 1 if of_first == 1 else 0  # `alpha` scales the subtracted operand, in additions the second
        terms[scaled] = terms[scaled] if alpha == 1 else terms[scaled] * alpha
        terms[constant] = hidden(terms[constant], terms[1 - constant])
        terms = [term if sign == 1 else -term for term, sign in zip(terms, (of_first, of_second), strict=True)]
        return (terms[0] + terms[1]).to(dtype)

    return form


def _in(dtype: torch.dtype, value: Any, like: Any = None) -> torch.Tensor:
    """An operand in the dtype in which ATen computes: float32 for bfloat16 and float16. A number keeps its value."""
    computed = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    if not isinstance(value, torch.Tensor):
        return torch.full((), value, dtype=computed, device=like.device)
    return wide(converted(value, dtype) if value.dim() else converted(value, computed))


def _is_power_of_two(divisor: Any) -> bool:
    """Whether a divisor is a number with an exact reciprocal: a power of two, 0, an infinity or NaN."""
    if isinstance(divisor, fx.Node):
        return False
    return not math.isfinite(divisor) or math.frexp(divisor)[0] in (0.5, -0.5, 0.0)
