"""Keys and values that several heads share: finds the repetition of heads before a matmul, and does without it.

Models repeat M heads G times and merge them: [B, M, T, D] is expanded to [B, M, G, T, D] and viewed as [B, M * G, T, D]
(`repeat_kv`, `repeat_interleave`, `enable_gqa=True`). `kp::attention` takes the M heads themselves, and sums their
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kp_dynamo.graph.editing import Insert, erase_unused
from kp_dynamo.graph.nodes import fake_of
from kp_dynamo.graph.op_tables import PERMUTATIONS, RESHAPES, SAME_ELEMENTS
from kp_dynamo.passes.attention.score_layout import are_equal
from kp_dynamo.passes.constants.values import factor_of

aten = torch.ops.aten

# A node, and the dimension of its result in which equal heads are neighbours.
NodeAndDim = tuple[fx.Node, int]


@dataclass(frozen=True)
class SharedHeads:
    """A matmul's operand [M * G, ...] that has each of M heads G times.

    Attributes:
        source: The heads before they are repeated, with a dimension of size 1 where they will be.
        count: G.
        steps: The nodes from the repetition to the operand.
    """

    source: fx.Node
    count: int
    steps: tuple[NodeAndDim, ...]

    def once(self, insert: Insert) -> fx.Node:
        """The operand with each head once, [M, ...]."""
        return _again(self.source, self.steps, self.count, insert)


@dataclass(frozen=True)
class SummedGradient:
    """The gradient of such an operand, up to its sum over equal heads.

    Attributes:
        steps: The nodes from the gradient to the sum.
        total: The sum.
        count: G.
    """

    steps: tuple[NodeAndDim, ...]
    total: fx.Node
    count: int

    def put(self, gradient: fx.Node, insert: Insert) -> None:
        """Read `gradient` [M, ...] instead, which is summed already: the sum is then over a dimension of size 1."""
        repeated = self.total.args[0]
        with gradient.graph.inserting_before(self.total):
            self.total.args = _again(gradient, self.steps, self.count, insert), *self.total.args[1:]
        erase_unused(repeated)  # type: ignore[arg-type]  # it is a node


@dataclass(frozen=True)
class Sharing:
    """The keys and values of an attention that several heads share, and their gradients where needed."""

    k: SharedHeads
    v: SharedHeads
    d_k: SummedGradient | None
    d_v: SummedGradient | None


def sharing_of(k: fx.Node, v: fx.Node, d_k: fx.Node | None, d_v: fx.Node | None) -> Sharing | None:
    """How both operands are shared; None if one is not, or if a gradient of repeated heads is needed."""
    keys, values = shared_heads(k), shared_heads(v)
    if keys is None or values is None or keys.count != values.count:
        return None
    sums = [None if d is None else summed_gradient(d, keys.count) for d in (d_k, d_v)]
    is_summed = all((d is None) == (total is None) for d, total in zip((d_k, d_v), sums, strict=True))
    return Sharing(keys, values, *sums) if is_summed else None


def shared_heads(operand: fx.Node) -> SharedHeads | None:
    """What a matmul's operand repeats; None if nothing."""
    path: list[fx.Node] = []
    node: Any = operand
    while isinstance(node, fx.Node):
        if (found := _repetition(node)) is not None:
            steps = _followed(reversed(path), *found)
            is_first = steps is not None and (steps[-1][1] if steps else found[0]) == 0
            return SharedHeads(node.args[0], found[1], steps) if is_first else None  # type: ignore[arg-type]
        if not _rearranges(node):
            return None
        path.append(node)
        node = node.args[0]
    return None


def summed_gradient(gradient: fx.Node, count: int) -> SummedGradient | None:
    """How the gradient of an operand is summed over equal heads; None if it is also read otherwise."""
    steps: list[NodeAndDim] = [(gradient, 0)]
    while len(users := list(steps[-1][0].users)) == 1:
        user, (source, dim) = users[0], steps[-1]
        if user.target is aten.sum.dim_IntList and not user.kwargs:
            is_of_heads = list(user.args[1]) == [dim] and fake_of(source).shape[dim] == count  # type: ignore[arg-type]
            return SummedGradient(tuple(steps[1:]), user, count) if is_of_heads else None
        followed = _followed([user], dim, count) if _rearranges(user) else None
        if followed is None:
            return None
        steps += followed
    return None


def _rearranges(node: fx.Node) -> bool:
    """Whether a node has the elements of its first operand in another order, dtype or scale."""
    if node.target in (*RESHAPES, *PERMUTATIONS, *SAME_ELEMENTS, aten._to_copy.default, aten.unsqueeze.default):
        return True
    if node.target is aten.expand.default:
        return are_equal(fake_of(node).shape, fake_of(node.args[0]).shape)  # type: ignore[arg-type]
    return factor_of(node) is not None


def _repetition(node: fx.Node) -> tuple[int, int] | None:
    """(dimension, size) of an expand that repeats along one dimension."""
    if node.target is not aten.expand.default:
        return None
    before, after = fake_of(node.args[0]).shape, fake_of(node).shape  # type: ignore[arg-type]
    if len(before) != len(after):
        return None
    changed = [dim for dim in range(len(after)) if not statically_known_true(before[dim] == after[dim])]
    sizes = [(before[dim], after[dim]) for dim in changed]
    if len(sizes) != 1 or sizes[0][0] != 1 or not isinstance(sizes[0][1], int):
        return None
    return changed[0], sizes[0][1]


def _followed(nodes: Iterable[fx.Node], dim: int, count: int) -> list[NodeAndDim] | None:
    """The nodes with the dimension that has equal heads; None if one of them separates those."""
    steps = []
    for node in nodes:
        found = _dim_after(node, dim, count)
        if found is None:
            return None
        steps.append((node, found))
        dim = found
    return steps


def _dim_after(node: fx.Node, dim: int, count: int) -> int | None:
    before, after = fake_of(node.args[0]).shape, fake_of(node).shape  # type: ignore[arg-type]
    if node.target in PERMUTATIONS:
        return _order(node, len(before)).index(dim)
    if node.target not in (*RESHAPES, aten.unsqueeze.default):
        return dim
    inner = math.prod(before[dim + 1 :])
    for place, size in enumerate(after):
        is_here = statically_known_true(math.prod(after[place + 1 :]) == inner)
        if is_here and statically_known_true(size % count == 0):
            return place if _can_resize(node, place) else None
    return None


def _can_resize(node: fx.Node, dim: int) -> bool:
    """Whether the reshape can be written again: a symbolic size becomes -1, and a reshape takes only one -1."""
    others = [size for place, size in enumerate(node.args[1:2][0]) if place != dim] if node.target in RESHAPES else []  # type: ignore[arg-type]
    return isinstance(fake_of(node).shape[dim], int) or -1 not in others


def _order(node: fx.Node, rank: int) -> list[int]:
    """Which dimension of the operand each one of the result is."""
    numbered = torch.empty(tuple(range(rank)), device="meta")
    return list(node.target(numbered, *node.args[1:]).shape)  # type: ignore[operator]  # it is an operator


def _again(value: fx.Node, steps: Iterable[NodeAndDim], count: int, insert: Insert) -> fx.Node:
    """The steps from a value that has each head once."""
    for node, dim in steps:
        if node.target in (*SAME_ELEMENTS, aten.expand.default):
            continue
        if node.target in RESHAPES:
            value = insert(aten.reshape.default, (value, _sizes(node, dim, count)), {}, like=node)
        else:
            value = insert(node.target, (value, *node.args[1:]), node.kwargs, like=node)
    return value


def _sizes(node: fx.Node, dim: int, count: int) -> list[Any]:
    """The sizes of a reshape without the repetition."""
    size, given = fake_of(node).shape[dim], list(node.args[1])  # type: ignore[arg-type]
    given[dim] = size // count if isinstance(size, int) else -1
    return given
