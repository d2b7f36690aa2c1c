"""Reads the operands of a matmul without their scales: the matmul's result is multiplied instead.

Attention scales queries and keys. In bfloat16, a scaled operand is rounded once more.
"""

from __future__ import annotations

import math

from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import VIEWS
from kp_dynamo.passes.constants.values import factor_of
from kp_dynamo.passes.precision.casts import Casts


class Unscaling:
    """The bfloat16 forms of scaled values without their scales, each inserted once."""

    def __init__(self, casts: Casts) -> None:
        self._casts = casts
        self._views: dict[fx.Node, fx.Node] = {}  # view of a scaled value -> that view, unscaled, in bfloat16

    def unscaled(self, node: fx.Node, before: fx.Node) -> tuple[fx.Node, float]:
        """The bfloat16 form of a float32 node without its scale, and the scale.

        The scale is 1 except for views of an exact value times a number that is not a power of two: casting the scaled
        value would round once more.
        """
        scaling = node
        while scaling.target in VIEWS:
            scaling = scaling.args[0]  # type: ignore[assignment]  # the first argument of a view is a tensor
        factor = _inexact_factor(scaling)
        if factor == 1 or not self._casts.is_exact(scaling.args[0]) or _is_broadcast(scaling.args[0]):  # type: ignore[arg-type]
            return self._casts.narrow(node, before), 1.0
        return self._unscaled_view(node, scaling, before), factor

    def _unscaled_view(self, node: fx.Node, scaling: fx.Node, before: fx.Node) -> fx.Node:
        """The views from `scaling` to `node`, applied to the bfloat16 form of the unscaled value."""
        if node is scaling:
            return self._casts.narrow(scaling.args[0], before)  # type: ignore[arg-type]
        if node not in self._views:
            source = self._unscaled_view(node.args[0], scaling, before)  # type: ignore[arg-type]
            with before.graph.inserting_before(before):
                args = (source, *node.args[1:])
                self._views[node] = self._casts.insert(node.target, args, node.kwargs, like=node)
        return self._views[node]


def _is_broadcast(node: object) -> bool:
    """Whether the tensor is expanded (stride 0); scaling materializes it, so the two admit different views."""
    value = tensor_of(node)
    return value is None or any(stride == 0 for stride in value.stride())


def _inexact_factor(node: fx.Node) -> float:
    """The factor of a node's first operand, or 1; powers of two count as 1, because they are exact in any dtype."""
    factor = factor_of(node)
    return 1.0 if factor is None or abs(math.frexp(factor)[0]) == 0.5 else factor
