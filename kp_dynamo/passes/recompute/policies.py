"""Decides which values of the forward part of a joint graph the backward recomputes. Does not edit the graph."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.op_tables import MATMULS, SOFTMAXES, VIEWS_AND_CASTS
from kp_dynamo.graph.saved_values import ForwardPart, flops_of
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.graph.unrepeatable import is_always_saved, is_unrepeatable

aten = torch.ops.aten


def attention_scores(nodes: list[fx.Node]) -> list[fx.Node]:
    """Scores, probabilities and the values between the two matmuls of an attention, [B, H, S, S] each.

    These are all values of the softmax's size from the first matmul, included, to the second. Values that a second run
    may change, and the masks computed from random ones, are left out.
    """
    forward, found = set(nodes), set[fx.Node]()
    for softmax in (n for n in nodes if n.target in SOFTMAXES):
        before = _same_size_values(softmax, lambda n: [s for s in n.all_input_nodes if s in forward])
        after = _same_size_values(softmax, lambda n: [u for u in n.users if u in forward])
        # The second matmul has another size, unless S is the width of a head.
        readers = {u for n in after for u in n.users} | after
        if any(n.target in MATMULS for n in before) and any(u.target in MATMULS for u in readers & forward):
            found |= before | {n for n in after if n.target not in MATMULS}
    return [n for n in nodes if n in found and not is_always_saved(n)]


def _same_size_values(start: fx.Node, neighbours: Callable[[fx.Node], list[fx.Node]]) -> set[fx.Node]:
    """The nodes reached from a node through values of its size, stopping at matmuls."""
    size, found, stack = _numel(start), {start}, [start]
    while stack:
        for node in neighbours(stack.pop()):
            if node not in found and _numel(node) == size:
                found.add(node)
                stack += [] if node.target in MATMULS else [node]
    return found


def _numel(node: fx.Node) -> str | None:
    """As text: comparing the values of symbolic sizes would specialize them."""
    tensor = tensor_of(node)
    return None if tensor is None else str(tensor.numel())


def residual_sums(nodes: list[fx.Node]) -> list[fx.Node]:
    """Sums x + f(x) of a value and matmuls computed from it: where the blocks of a model end."""
    forward, found = set(nodes), dict[fx.Node, None]()
    for node in nodes:
        if node.target is aten.add.Tensor and any(_is_skip(x, fx_, forward, found) for x, fx_ in _both_ways(node)):
            found[node] = None
    return list(found)


def _both_ways(add: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    one, other = add.args[:2]
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or _shape(one) != _shape(other):
        return []
    return [(one, other), (other, one)]


def _is_skip(x: fx.Node, made: fx.Node, forward: set[fx.Node], ends: dict[fx.Node, None]) -> bool:
    """Whether `made` is computed from `x` through a matmul within one block: not past the sums at its ends."""
    while x.target in VIEWS_AND_CASTS and isinstance(x.args[0], fx.Node) and x.args[0] in forward:
        x = x.args[0]
    seen, stack = {made}, [made]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in seen and source in forward:
                seen.add(source)
                stack += [] if source is x or source in ends else [source]
    return x in seen and any(n.target in MATMULS for n in seen - {x})


def _shape(node: fx.Node) -> tuple[str, ...] | None:
    tensor = tensor_of(node)
    return None if tensor is None else tuple(map(str, tensor.shape))


@dataclass(frozen=True)
class FreedValue:
    """One value that is no longer saved.

    Attributes:
        node: The value.
        freed_bytes: Its size.
        recomputed_nodes: The nodes recomputed for it and for no earlier step, itself included.
    """

    node: fx.Node
    freed_bytes: int
    recomputed_nodes: tuple[fx.Node, ...]

    @property
    def flops(self) -> int:
        """Operations of the matmuls among the recomputed nodes."""
        return flops_of(self.recomputed_nodes)


def cheapest_first(part: ForwardPart, keep: Callable[[fx.Node], bool]) -> Iterator[FreedValue]:
    """Values to stop saving, the most bytes per operation first; each is dropped from `part` as it is yielded.

    A value that one of them recomputes is free for the next ones. `keep` selects those that stay saved. Attention
    scores go first: they are many times as large as their operands, and the TPU's compiler is faster if they do not
    cross from one program to the next.
    """
    greedy = _Greedy(part, [n for n in part.saved if not keep(n) and not is_always_saved(n)])
    while (step := greedy.take()) is not None:
        yield step


class _Greedy:
    """A heap of candidates; a step reprices the candidates whose cost it changes."""

    def __init__(self, part: ForwardPart, candidates: list[fx.Node]) -> None:
        self._part = part
        self._recomputed: set[fx.Node] = set()  # recomputed already
        self._near: defaultdict[fx.Node, set[fx.Node]] = defaultdict(set)  # node -> candidates it affects
        self._version: dict[fx.Node, int] = dict.fromkeys(candidates, 0)
        self._heap: list[tuple[tuple[bool, float], int, int, fx.Node]] = []
        self._number = {n: i for i, n in enumerate(candidates)}
        self._scores = set(attention_scores(part.nodes))
        for node in candidates:
            self._price(node)

    def take(self) -> FreedValue | None:
        while self._heap:
            _, _, version, node = heapq.heappop(self._heap)
            if self._version.get(node) == version:
                return self._drop(node)
        return None

    def _drop(self, node: fx.Node) -> FreedValue:
        new = [n for n in self._part.to_recompute(node) if n not in self._recomputed]
        step = FreedValue(node, node_bytes(node), tuple(new))
        del self._version[node]
        self._part.drop(node)
        self._recomputed.update(new)
        for other in set().union(*(self._near[n] for n in new)) & self._version.keys():
            self._version[other] += 1
            self._price(other)
        return step

    def _price(self, node: fx.Node) -> None:
        cone = self._part.to_recompute(node)
        for near in {*cone, *(s for n in cone for s in n.all_input_nodes)}:
            self._near[near].add(node)
        new = [n for n in cone if n not in self._recomputed]
        # Bytes count as operations, so that pointwise work is not free, and short chains go before long ones.
        cost = 1 + flops_of(new) + sum(map(node_bytes, new))
        if not any(is_unrepeatable(n) for n in cone):
            price = (node not in self._scores, cost / max(1, node_bytes(node)))
            heapq.heappush(self._heap, (price, self._number[node], self._version[node], node))
