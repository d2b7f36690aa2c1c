"""Matches attention in a graph: matmul, scale, mask, softmax, matmul. Does not edit the graph.

Shapes: B batch, H heads, N = B x H, S queries, T keys, D and E widths of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import VIEWS
from kp_dynamo.passes.attention.score_layout import layout_problem
from kp_dynamo.passes.constants.values import constant_of, factor_of

aten = torch.ops.aten

_CASTS = (aten._to_copy.default,)
_FACTORS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)
_MOVES = (*VIEWS, *_CASTS)


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


@dataclass(frozen=True)
class Attention:
    """An attention of the forward.

    Attributes:
        first: The matmul q @ k.
        second: The matmul of the probabilities and v.
        softmax: The node between them.
        weights: The first operand of `second`.
        inside: The nodes from `first` to `second`, without `second`.
        scale: The factor of the scores, applied after `first`.
        masks: In the order in which they are applied.
        batch_dims: Sizes of the scores before [S, T], some of which a mask may have; numbers or nodes.
        zeroes_rows: Whether a row without a score above -inf becomes 0: torch's "safe" softmax.
    """

    first: fx.Node
    second: fx.Node
    softmax: fx.Node
    weights: fx.Node
    inside: frozenset[fx.Node]
    scale: float
    masks: tuple[Mask, ...]
    batch_dims: tuple[Any, ...]
    zeroes_rows: bool


class Refusal(Exception):
    """The reason why a softmax between two matmuls is left alone; never leaves the pass."""


def attention_at(softmax: fx.Node, forward: set[fx.Node]) -> Attention | None:
    """The attention that a softmax of the forward belongs to, or None if it is not between two matmuls.

    Raises:
        Refusal: It is an attention that cannot be rewritten.
    """
    above = _ScoreChain(forward)
    above.walk_up(softmax.args[0])
    if above.first is None:
        return None
    below = _walk_down(softmax, forward)
    if below is None:
        return None
    if above.problem:
        raise Refusal(above.problem)
    for node, source in (*above.steps, *below.steps):
        if problem := layout_problem(node, source, above.first):
            raise Refusal(problem)
    _check_softmax(softmax)
    inside = above.seen | below.seen
    found = Attention(
        above.first, below.second, softmax, below.weights, frozenset(inside), above.scale,
        tuple(reversed(above.masks)), above.batch_dims, below.zeroes_rows,
    )  # fmt: skip
    _check(found, forward)
    return found


@dataclass
class _ScoreChain:
    """The nodes from the softmax up to the matmul of queries and keys."""

    forward: set[fx.Node]
    first: fx.Node | None = None
    scale: float = 1.0
    masks: list[Mask] = field(default_factory=list)
    batch_dims: tuple[Any, ...] = ()
    seen: set[fx.Node] = field(default_factory=set)
    steps: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    problem: str | None = None

    def walk_up(self, node: Any) -> None:
        while isinstance(node, fx.Node) and node in self.forward and self.first is None:
            self.seen.add(node)
            if node.target is aten.bmm.default:
                self.first = node
            else:
                source = self._step(node)
                self.steps.append((node, source))
                node = source

    def _step(self, node: fx.Node) -> Any:
        """The scores that a node reads; records what the node does to them."""
        if node.target in _MOVES:
            return node.args[0]
        if (factor := factor_of(node)) is not None:
            self.scale *= factor
            return node.args[0]
        masked = _masked(node, self.forward)
        if masked is None:
            # A matmul may lie beyond this op: the problem counts only if one is found.
            self.problem = self.problem or f"its scores pass through {node.target}"
            return next((s for s in node.all_input_nodes if _leads_to_matmul(s, self.forward)), None)
        scores, mask = masked
        if mask.fill is not None and self.scale > 0:
            mask = replace(mask, fill=mask.fill * self.scale)
        elif self.scale != 1:
            self.problem = self.problem or f"{node.name} masks the scores before they are scaled"
        self._note_batch_dims(node)
        self.masks.append(mask)
        return scores

    def _note_batch_dims(self, node: fx.Node) -> None:
        batch_dims = _batch_dims(node)
        if batch_dims is None or (self.batch_dims and self.batch_dims != batch_dims):
            self.problem = self.problem or f"the shape of {node.name} is symbolic, or differs from that of another mask"
        self.batch_dims = batch_dims or ()


def _masked(node: fx.Node, forward: set[fx.Node]) -> tuple[fx.Node, Mask] | None:
    """(scores, mask) of a node that masks scores, or None."""
    if node.target is aten.where.self:
        condition, one, other = node.args
        for scores, constant, lets in ((one, other, True), (other, one, False)):
            fill = _fill(node, constant)
            if fill is not None and isinstance(scores, fx.Node) and _is_boolean(condition):
                return scores, Mask(condition, fill, lets)  # type: ignore[arg-type]  # a tensor is a node
    if node.target is aten.masked_fill.Scalar:
        scores, condition, number = node.args
        fill = _fill(node, number)
        if fill is not None and _is_boolean(condition):
            return scores, Mask(condition, fill, lets_through=False)  # type: ignore[arg-type, return-value]
    if node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args):
        for scores, mask in (node.args, reversed(node.args)):
            if _leads_to_matmul(scores, forward) and not _leads_to_matmul(mask, forward):
                return scores, Mask(mask)  # type: ignore[arg-type, return-value]
    return None


def _fill(node: fx.Node, argument: object) -> float | None:
    """The number that a node puts in place of scores, in the dtype of its result."""
    constant, result = constant_of(argument), tensor_of(node)
    if constant is None or result is None or not constant.is_real or not result.dtype.is_floating_point:
        return None
    return constant.as_float(result.dtype)


def _is_boolean(node: object) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bool


def _leads_to_matmul(node: object, forward: set[fx.Node]) -> bool:
    """Whether a value is a batched matmul, possibly moved, scaled and masked."""
    if not isinstance(node, fx.Node) or node not in forward:
        return False
    if node.target is aten.bmm.default:
        return True
    if node.target is aten.add.Tensor:
        return any(_leads_to_matmul(source, forward) for source in node.args)
    if node.target is aten.where.self:
        return any(_leads_to_matmul(source, forward) for source in node.args[1:])
    if node.target in (*_MOVES, *_FACTORS, aten.masked_fill.Scalar):
        return _leads_to_matmul(node.args[0], forward)
    return False


def _batch_dims(node: fx.Node) -> tuple[Any, ...] | None:
    """The sizes of a node before its last two; symbolic ones as arguments of a view."""
    value = tensor_of(node)
    assert value is not None, "scores are a tensor"
    sizes: list[Any] = list(value.shape[:-2])
    if all(isinstance(size, int) for size in sizes):
        return tuple(sizes)
    while node.target in (aten.add.Tensor, *_FACTORS, *_CASTS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    given = node.args[1] if node.target in (aten.view.default, aten._unsafe_view.default) else None
    if not isinstance(given, (list, tuple)) or any(size == -1 for size in given if isinstance(size, int)):
        return None
    return tuple(given[:-2])


@dataclass(frozen=True)
class _ValueChain:
    second: fx.Node
    weights: fx.Node
    steps: list[tuple[fx.Node, fx.Node]]
    seen: set[fx.Node]
    zeroes_rows: bool


def _walk_down(softmax: fx.Node, forward: set[fx.Node]) -> _ValueChain | None:
    """The nodes from the softmax down to the matmul with the values."""
    node, seen, zeroes_rows = softmax, {softmax}, softmax.target is aten._safe_softmax.default
    steps: list[tuple[fx.Node, fx.Node]] = []
    if rule := _zero_rule(softmax, forward):
        seen |= set(rule)
        node, zeroes_rows = rule[-1], True
    while True:
        readers = [user for user in node.users if user in forward or user.op == "output"]
        matmuls = [user for user in readers if user.target is aten.bmm.default and user.args[0] is node]
        if matmuls:
            return _ValueChain(matmuls[0], node, steps, seen, zeroes_rows)
        moves = [user for user in readers if user.target in _MOVES]
        if not moves:
            _refuse_matmuls_after(readers, forward)
            return None
        steps.append((moves[0], node))
        node = moves[0]
        seen.add(node)


def _refuse_matmuls_after(readers: list[fx.Node], forward: set[fx.Node]) -> None:
    """Raise if the probabilities reach a matmul through another op: that is an attention too."""
    for reader in readers:
        node, steps = reader, 0
        while steps < 6 and node in forward:
            if node.target is aten.bmm.default:
                raise Refusal(f"its probabilities pass through {reader.target}: dropout?")
            following = [u for u in node.users if u in forward]
            if not following:
                break
            node, steps = following[0], steps + 1


def _zero_rule(softmax: fx.Node, forward: set[fx.Node]) -> list[fx.Node]:
    """The nodes of where(all(scores == -inf), 0, softmax), which zeroes rows of -inf; the result is last."""
    scores = softmax.args[0]
    for where in [user for user in softmax.users if user.target is aten.where.self and user in forward]:
        dead, zeros, weights = where.args
        if weights is not softmax or not isinstance(dead, fx.Node) or _fill(where, zeros) != 0:
            continue
        equal = dead.args[0]
        if not _is_over_keys(dead) or not isinstance(equal, fx.Node) or equal.target is not aten.eq.Scalar:
            continue
        if equal.args[0] is scores and equal.args[1] == -math.inf:
            zero_nodes = [zeros] if isinstance(zeros, fx.Node) and softmax in zeros.all_input_nodes else []
            return [equal, dead, *zero_nodes, where]
    return []


def _is_over_keys(node: fx.Node) -> bool:
    """Whether a node tests for each row whether all of it is true."""
    value = tensor_of(node)
    if node.target is not aten.all.dim or value is None or node.args[2:] != (True,):
        return False
    return node.args[1] in (-1, value.dim() - 1)


def _check_softmax(softmax: fx.Node) -> None:
    value, dim = tensor_of(softmax), softmax.args[1]
    assert value is not None, "probabilities are a tensor"
    if dim not in (-1, value.dim() - 1):
        raise Refusal(f"its softmax is over dimension {dim}, not over the keys")


def _check(found: Attention, forward: set[fx.Node]) -> None:
    q, k = found.first.args
    dtypes = {tensor_of(x).dtype for x in (q, k, found.second.args[1], found.second)}  # type: ignore[union-attr]
    if len(dtypes) > 1 or not next(iter(dtypes)).is_floating_point:
        raise Refusal("its matmuls do not share one floating-point dtype")
    scores = tensor_of(found.softmax)
    if scores is None or any(isinstance(size, int) and size == 0 for size in scores.shape):
        raise Refusal("it has no scores: a size is 0")
    for node in sorted(found.inside):
        for user in node.users:
            if user.op == "output":
                raise Refusal(f"{node.name} is an output of the graph")
            if user in forward and user not in found.inside and user is not found.second:
                raise Refusal(f"{user.name} also reads {node.name}")
