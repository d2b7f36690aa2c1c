"""Finds the blocks of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from kp_dynamo.blocks.matching import Matcher, Repeat
from kp_dynamo.blocks.node_effects import Effects, EffectsOfNodes
from kp_dynamo.blocks.repeats import runs

Accept = Callable[[Sequence[Effects], int], bool]
"""(effects of the calls of a block, how many times it occurs) -> whether to make it a piece."""


class BlockSearch:
    """Finds the blocks of a graph: those that cover most first, then others to their left and right.

    Args:
        nodes: The calls of the graph.
        ids: Their numbers, see `node_ids`.
        matcher: Compares the edges of what repeats.
        effects: What each call does.
        accept: Decides about each block.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], ids: Sequence[int], matcher: Matcher, effects: EffectsOfNodes, accept: Accept
    ) -> None:
        self._nodes, self._ids, self._matcher, self._effects = nodes, ids, matcher, effects
        self._accept = accept

    def repeats(self) -> list[Repeat]:
        """Blocks that do not overlap, in the order of the graph."""
        return self._between(0, len(self._nodes))

    def _between(self, first: int, last: int) -> list[Repeat]:
        for run in runs(self._ids[first:last], self._matcher.least):
            moved = run._replace(start=run.start + first, stop=run.stop + first)
            # A block has a matmul: this also excludes most repeats quickly.
            if not any(self._effects[node].flops for node in self._nodes[moved.start : moved.start + moved.period]):
                continue
            found = self._matcher.repeat(moved)
            if found is not None and self._accept(self._effects_of(found), found.count):
                return [*self._between(first, found.start), found, *self._between(found.stop, last)]
        return []

    def _effects_of(self, repeat: Repeat) -> list[Effects]:
        return [self._effects[node] for node in self._nodes[repeat.start : repeat.start + repeat.period]]
