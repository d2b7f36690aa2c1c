"""Follows the scores of an attention from its softmax up to the matmul of queries and keys. Does not edit the graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import fake_of, tensor_of
from kp_dynamo.graph.op_tables import DIVISIONS, MULTIPLICATIONS, RESHAPES, VIEWS_AND_CASTS
from kp_dynamo.passes.constants.values import MAX_FACTOR, constant_of, factor_of

aten = torch.ops.aten

_LOOKUPS = (aten.embedding.default, aten.index.Tensor, aten.index_select.default)

_FACTORS = (*MULTIPLICATIONS, *DIVISIONS)


@dataclass(frozen=True)
class Mask:
    """A mask between the first matmul and the softmax.

    Attributes:
        node: Booleans that select scores, or a value to add, of any dtype; broadcasts to the scores.
        fill: The number that replaces a masked score; None if the mask is added.
        lets_through: The value of a boolean mask where a score stays.
    """

    node: fx.Node
    fill: float | None = None
    lets_through: bool = True


@dataclass
class ScoreChain:
    """The nodes from the softmax up to the matmul of queries and keys.

    Attributes:
        forward: The nodes that it may contain.
        first: The matmul, or None.
        scale: The factor of the scores, applied after the matmul.
        soft_cap: The bound of the scores, `soft_cap * tanh(scores / soft_cap)`, or 0.
        masks: From the softmax up.
        batch_dims: Sizes of the scores before [S, T], some of which a mask may have; numbers or nodes.
        seen: The nodes up to the matmul, included.
        steps: Pairs (node, the scores that it reads).
        problem: Why the scores of this matmul cannot be those of `kp::attention`, or None.
    """

    forward: set[fx.Node]
    first: fx.Node | None = None
    scale: float = 1.0
    soft_cap: float = 0.0
    masks: list[Mask] = field(default_factory=list)
    batch_dims: tuple[Any, ...] = ()
    seen: set[fx.Node] = field(default_factory=set)
    steps: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    problem: str | None = None

    def walk_up(self, node: Any) -> None:
        while isinstance(node, fx.Node) and node in self.forward and self.first is None:
            self.seen.add(node)
            if is_score_matmul(node):
                self._finish(node)
            else:
                source = self._step(node)
                self.steps.append((node, source))
                node = source

    def _finish(self, matmul: fx.Node) -> None:
        """End at the matmul; one that also adds a mask adds it before all factors."""
        self.first = matmul
        if matmul.target is aten.baddbmm.default:
            if self.scale != 1 or self.soft_cap:
                self.problem = self.problem or f"{matmul.name} masks the scores before they are scaled or capped"
            self.note_batch_dims(matmul)
            self.masks += [Mask(part) for part in _parts(matmul.args[0])]  # type: ignore[arg-type]  # it is a tensor
        self.scale *= self.soft_cap or 1.0

    def _step(self, node: fx.Node) -> Any:
        """The scores that a node reads; records what the node does to them."""
        if node.target in VIEWS_AND_CASTS:
            return node.args[0]
        if (factor := factor_of(node)) is not None:
            self.scale *= factor
            return node.args[0]
        if node.target is aten.tanh.default and not self.soft_cap and 0 < self.scale <= MAX_FACTOR:
            self.soft_cap, self.scale = self.scale, 1.0
            return node.args[0]
        masked = _masked(node, self.forward)
        if masked is None:
            # A matmul may lie beyond this op: the problem counts only if one is found.
            self.problem = self.problem or f"its scores pass through {node.target}"
            return next((s for s in node.all_input_nodes if _leads_to_matmul(s, self.forward)), None)
        scores, mask = masked
        if self.soft_cap:
            self.problem = self.problem or f"{node.name} masks the scores before their soft cap"
        if mask.fill is not None and self.scale > 0:
            mask = replace(mask, fill=mask.fill * self.scale)
        elif self.scale != 1:
            self.problem = self.problem or f"{node.name} masks the scores before they are scaled"
        self.note_batch_dims(node)
        self.masks += [mask] if mask.fill is not None else [Mask(part) for part in _parts(mask.node)]
        return scores

    def note_batch_dims(self, node: fx.Node) -> None:
        """Record the sizes of scores before [S, T], for what broadcasts to them."""
        batch_dims = _batch_dims(node)
        if batch_dims is None or (self.batch_dims and self.batch_dims != batch_dims):
            self.problem = self.problem or f"the shape of {node.name} is symbolic, or differs from that of another mask"
        self.batch_dims = batch_dims or ()


def is_score_matmul(node: fx.Node) -> bool:
    """Whether a node multiplies batches of matrices, and possibly adds a mask: `nn.MultiheadAttention` does."""
    is_plain = all(factor == 1 for factor in node.kwargs.values())
    return node.target is aten.bmm.default or (node.target is aten.baddbmm.default and is_plain)


def _parts(mask: fx.Node) -> list[fx.Node]:
    """The terms of a mask that is added, if their sum is larger than each: a bias of heads and a mask of sequences.

    Added one by one, they are rounded in another order. So a sum stays whose terms could cancel, because both are
    computed from one value, and one of booleans or integers, which adds in another way.
    """
    terms = [x for x in mask.args if isinstance(x, fx.Node)]
    if mask.target is not aten.add.Tensor or mask.kwargs or len(terms) != 2:
        return [mask]
    dtypes = {fake_of(x).dtype for x in (mask, *terms)}
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point or _sources(terms[0]) & _sources(terms[1]):
        return [mask]
    size, *sizes = (math.prod(fake_of(x).shape) for x in (mask, *terms))
    is_larger = all(isinstance(other, int) and other < size for other in sizes)
    return [part for term in reversed(terms) for part in _parts(term)] if is_larger else [mask]


def _sources(node: fx.Node) -> set[fx.Node]:
    """The inputs from which the values of a node are computed, other than through booleans."""
    found: set[fx.Node] = set()
    seen, stack = set[fx.Node](), [node]
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        if node in seen or not isinstance(value, torch.Tensor) or value.dtype == torch.bool:
            continue
        seen.add(node)
        if node.op == "placeholder":
            found.add(node)
        # The values of an embedding are those of its table.
        stack += node.all_input_nodes[:1] if node.target in _LOOKUPS else node.all_input_nodes
    return found


def _masked(node: fx.Node, forward: set[fx.Node]) -> tuple[fx.Node, Mask] | None:
    """(scores, mask) of a node that masks scores, or None."""
    if node.target is aten.where.self:
        condition, one, other = node.args
        for scores, constant, lets in ((one, other, True), (other, one, False)):
            fill = replaced_value(node, constant)
            if fill is not None and isinstance(scores, fx.Node) and _is_boolean(condition):
                return scores, Mask(condition, fill, lets)  # type: ignore[arg-type]  # a tensor is a node
    if node.target is aten.masked_fill.Scalar:
        scores, condition, number = node.args
        fill = replaced_value(node, number)
        if fill is not None and _is_boolean(condition):
            return scores, Mask(condition, fill, lets_through=False)  # type: ignore[arg-type, return-value]
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        for scores, mask in (node.args, reversed(node.args)):
            if _leads_to_matmul(scores, forward) and not _leads_to_matmul(mask, forward):
                return scores, Mask(mask)  # type: ignore[arg-type, return-value]
    return None


def replaced_value(node: fx.Node, argument: object) -> float | None:
    """The number that a node puts in place of scores, in the dtype of its result."""
    constant, result = constant_of(argument), tensor_of(node)
    if constant is None or result is None or not constant.is_real or not result.dtype.is_floating_point:
        return None
    return constant.as_float(result.dtype)


def _is_boolean(node: object) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bool


def _leads_to_matmul(node: object, forward: set[fx.Node]) -> bool:
    """Whether a value is a batched matmul, possibly moved, scaled, capped and masked."""
    if not isinstance(node, fx.Node) or node not in forward:
        return False
    if is_score_matmul(node):
        return True
    if node.target is aten.add.Tensor:
        return any(_leads_to_matmul(source, forward) for source in node.args)
    if node.target is aten.where.self:
        return any(_leads_to_matmul(source, forward) for source in node.args[1:])
    if node.target in (*VIEWS_AND_CASTS, *_FACTORS, aten.masked_fill.Scalar, aten.tanh.default):
        return _leads_to_matmul(node.args[0], forward)
    return False


def _batch_dims(node: fx.Node) -> tuple[Any, ...] | None:
    """The sizes of a node before its last two; symbolic ones as arguments of a view."""
    value = tensor_of(node)
    assert value is not None, "scores are a tensor"
    sizes: list[Any] = list(value.shape[:-2])
    if all(isinstance(size, int) for size in sizes):
        return tuple(sizes)
    while node.target in (aten.add.Tensor, *_FACTORS, aten._to_copy.default) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    given = node.args[1] if node.target in RESHAPES else None
    if not isinstance(given, (list, tuple)) or any(size == -1 for size in given if isinstance(size, int)):
        return None
    return tuple(given[:-2])
