"""Where Dynamo's graph may be divided into pieces that run one after the other, and how many values cross there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.blocks.node_effects import Effects, operands_of
from kp_dynamo.blocks.regions import Region
from kp_dynamo.capture.xla_autocast import ENTER_AUTOCAST


class Boundaries:
    """The positions between the calls of a graph: position b is before call b.

    Attributes:
        written: The inputs of the graph that it writes to.
        regions: The state of the process at each position.

    Args:
        graph: Dynamo's graph.
        nodes: Its calls.
        effects: What each call does.
        regions: See above.
        inputs: The inputs of the graph as they are before it runs.
    """

    def __init__(
        self,
        graph: fx.Graph,
        nodes: Sequence[fx.Node],
        effects: Mapping[fx.Node, Effects],
        regions: Sequence[Region],
        inputs: Sequence[Any],
    ) -> None:
        self.regions = regions
        self._position = {node: i for i, node in enumerate(nodes)}
        self._last_use = {node: self._last_call(node, in_results=False) for node in nodes}
        self._closed = {i: "a transform of torch.func is open" for i, region in enumerate(regions) if region.level}
        placeholders = graph.find_nodes(op="placeholder")
        aliases, written_at = self._aliases([*placeholders, *nodes]), self._writes(nodes, effects)
        self.written = [node for node in placeholders if not written_at.keys().isdisjoint(_storages(node))]
        for node in nodes:
            # Pieces pass tensors only; an autocast region that is open where a piece begins is entered again there.
            if not isinstance(node.meta.get("example_value"), torch.Tensor) and node.target is not ENTER_AUTOCAST:
                self._close(self._position[node], self._last_use[node], f"{node} passes, which is no tensor")
        of_inputs = {storage for node in placeholders for storage in _storages(node)}
        for storage, positions in written_at.items():
            self._close_around_writes(aliases[storage], positions, is_input=storage in of_inputs)
        for node, before in zip(placeholders, inputs, strict=True):
            if _gains_gradient(node, before):
                written = [p for storage in _storages(node) for p in written_at.get(storage, ())]
                sharing = [alias for storage in _storages(node) for alias in aliases[storage]]
                self._close_after_gradient(node, written, sharing)
        self._crossing = self._count_crossing(nodes)

    def is_open(self, position: int) -> bool:
        """Whether the graph may be divided here."""
        return position not in self._closed

    def reason(self, position: int) -> str:
        """Why the graph may not be divided here: the end of a sentence."""
        return self._closed[position]

    def crossing(self, position: int) -> int:
        """The number of values computed before a position that are used after it."""
        return self._crossing[position]

    def _last_call(self, node: fx.Node, *, in_results: bool) -> int:
        end = len(self._position)
        uses = (self._position.get(user, end if user.op == "output" and in_results else -1) for user in node.users)
        return max(uses, default=-1)

    def _close(self, first: int, last: int, reason: str) -> None:
        """Forbid the positions between two calls."""
        for position in range(first + 1, last + 1):
            self._closed.setdefault(position, reason)

    def _aliases(self, nodes: Iterable[fx.Node]) -> dict[int, list[fx.Node]]:
        found: dict[int, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            for storage in _storages(node):
                found[storage].append(node)
        return found

    def _writes(self, nodes: Sequence[fx.Node], effects: Mapping[fx.Node, Effects]) -> dict[int, list[int]]:
        """Storage -> the positions of the calls that write to it."""
        found: dict[int, list[int]] = defaultdict(list)
        for node in nodes:
            operands = operands_of(node) if effects[node].writes else []
            for number in effects[node].writes:
                for storage in _storages(operands[number]):
                    found[storage].append(self._position[node])
        return found

    def _close_around_writes(self, aliases: Sequence[fx.Node], written_at: Sequence[int], *, is_input: bool) -> None:
        """A value must not be written to in a later piece, nor a view of a written input cross into one.

        A piece may write to an input of the graph: all later pieces receive that tensor itself.
        """
        made = [node for node in aliases if node in self._position]
        if not is_input:
            first = min(made, key=self._position.__getitem__)
            self._close(self._position[first], max(written_at), f"{first} passes, which is written to in place later")
            return
        for node in made:
            reason = f"{node} passes, a view of an input that the graph writes to"
            self._close(self._position[node], self._last_use[node], reason)

    def _close_after_gradient(self, node: fx.Node, written_at: Sequence[int], aliases: Sequence[fx.Node]) -> None:
        """An input that a write makes part of autograd's graph stays in one piece from then on.

        A later piece would be compiled for the tensor as it is before the graph runs: without a gradient.
        """
        last = max(self._last_call(alias, in_results=False) for alias in aliases)
        self._close(min(written_at, default=-1), last, f"{node} passes, which requires a gradient only after a write")

    def _count_crossing(self, nodes: Sequence[fx.Node]) -> list[int]:
        change = [0] * (len(nodes) + 2)
        for node in nodes:
            last = self._last_call(node, in_results=True)
            if last > self._position[node]:
                change[self._position[node] + 1] += 1
                change[last + 1] -= 1
        counts, count = [], 0
        for position in range(len(nodes) + 1):
            count += change[position]
            counts.append(count)
        return counts


def _gains_gradient(node: fx.Node, before: Any) -> bool:
    """Whether an input requires a gradient after the graph has run, and not before it."""
    after = node.meta.get("example_value")
    return isinstance(after, torch.Tensor) and after.requires_grad and not before.requires_grad


def _storages(node: fx.Node) -> set[int]:
    """The storages of a node's value, which is a tensor or holds tensors."""
    found: set[int] = set()
    example = node.meta.get("example_value")
    for value in [example] if isinstance(example, torch.Tensor) else torch.utils._pytree.tree_leaves(example):
        # A tensor of torch.func has no storage of its own, and lives inside the transform.
        is_wrapped = isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
        if isinstance(value, torch.Tensor) and not is_wrapped and value.layout is torch.strided:
            found.add(value.untyped_storage()._cdata)
    return found
