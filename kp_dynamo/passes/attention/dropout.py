"""Matches the dropout of an attention's probabilities, and its backward. Does not edit the graph.

The operators draw their own mask: `ops/dropout_mask.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import SAME_ELEMENTS, UNIFORM
from kp_dynamo.passes.attention.score_layout import are_equal
from kp_dynamo.passes.constants.values import constant_of, factor_of

aten = torch.ops.aten


@dataclass(frozen=True)
class AppliedDropout:
    """The nodes of probabilities * where(random >= rate, 1 / (1 - rate), 0).

    Attributes:
        product: The probabilities after dropout.
        factors: What they are multiplied by.
        mask: True where a probability stays; the backward reads it too.
        random: The random numbers.
        rate: The share of probabilities that become 0.
    """

    product: fx.Node
    factors: fx.Node
    mask: fx.Node
    random: fx.Node
    rate: float

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return self.product, self.factors, self.mask, self.random

    def source_of(self, gradient: fx.Node) -> tuple[fx.Node, set[fx.Node]] | None:
        """For g * (mask * 1 / (1 - rate)), the gradient g and the other nodes; None for any other node."""
        if gradient.target is not aten.mul.Tensor or len(gradient.args) != 2:
            return None
        for source, factors in (gradient.args, reversed(gradient.args)):
            seen = self._scaled_mask(factors)
            if seen and isinstance(source, fx.Node):
                return source, {gradient, *seen}
        return None

    def _scaled_mask(self, node: object) -> set[fx.Node]:
        """The nodes from a multiple of the mask up to the mask, without it; empty for any other node."""
        if not isinstance(node, fx.Node) or not _is_scale(factor_of(node), self.rate):
            return set()
        seen, node = {node}, node.args[0]
        while isinstance(node, fx.Node) and node.target in (*SAME_ELEMENTS, aten._to_copy.default):
            seen.add(node)
            node = node.args[0]
        return seen if node is self.mask else set()


def dropout_of(weights: fx.Node, readers: list[fx.Node]) -> AppliedDropout | None:
    """The dropout among the readers of probabilities, or None."""
    for product in readers:
        if product.target is not aten.mul.Tensor or len(product.args) != 2 or product.kwargs:
            continue
        for source, factors in (product.args, reversed(product.args)):
            if source is weights and (found := _applied(product, factors)):
                return found
    return None


def _applied(product: fx.Node, factors: object) -> AppliedDropout | None:
    """The dropout that `product` applies with these factors, or None if they are something else."""
    if not isinstance(factors, fx.Node) or factors.target is not aten.where.self:
        return None
    mask, scale, zero = factors.args
    if not isinstance(mask, fx.Node) or mask.target is not aten.ge.Scalar:
        return None
    random, rate = mask.args
    kept, dropped = constant_of(scale), constant_of(zero)
    if not isinstance(random, fx.Node) or random.target not in UNIFORM or set(random.users) != {mask}:
        return None
    if not isinstance(rate, float) or not 0 < rate < 1 or kept is None or dropped is None or dropped.value != 0:
        return None
    if not kept.is_real or not _is_scale(float(kept.value), rate) or not _have_one_shape(product, random):  # type: ignore[arg-type]
        return None
    return AppliedDropout(product, factors, mask, random, rate)


def _is_scale(factor: float | None, rate: float) -> bool:
    return factor is not None and math.isclose(factor, 1 / (1 - rate), rel_tol=1e-6)


def _have_one_shape(one: fx.Node, other: fx.Node) -> bool:
    """Whether each probability has a random number of its own; F.dropout1d and others share one along a dimension."""
    a, b = tensor_of(one), tensor_of(other)
    return a is not None and b is not None and are_equal(a.shape, b.shape)
