"""Compares the edges of repeated stretches: the proof that they are one block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from kp_dynamo.blocks.boundaries import Boundaries
from kp_dynamo.blocks.node_effects import operands_of, users_of
from kp_dynamo.blocks.repeats import Run
from kp_dynamo.cache.graph_text import tensor_text


@dataclass(frozen=True)
class Repeat:
    """A block that occurs several times in succession.

    Attributes:
        start: Position of its first call.
        period: Number of its calls.
        count: How many times it occurs.
        inputs: For each input of the block, the node that it is in each occurrence.
        outputs: Offsets, within the block, of the calls whose values are used outside their occurrence.
        model: Number of an occurrence whose inputs are different nodes: the first layer often gets one value twice.
        layers: The number of equal layers in an occurrence.
    """

    start: int
    period: int
    count: int
    inputs: tuple[tuple[fx.Node, ...], ...]
    outputs: tuple[int, ...]
    model: int
    layers: int = 1

    @property
    def stop(self) -> int:
        """The position after the last occurrence."""
        return self.start + self.period * self.count


class Matcher:
    """Finds the blocks of one graph.

    Args:
        nodes: The calls of the graph.
        boundaries: Where it may be divided.
        least: Least number of occurrences.
    """

    def __init__(self, nodes: Sequence[fx.Node], boundaries: Boundaries, least: int) -> None:
        self._nodes, self._boundaries, self.least = nodes, boundaries, least
        self._position = {node: i for i, node in enumerate(nodes)}
        self._operands = [operands_of(node) for node in nodes]

    def repeat(self, run: Run) -> Repeat | None:
        """The block of a run, divided where the fewest values cross; None if its edges differ or it cannot be cut."""
        starts = range(run.start, min(run.start + run.period, run.stop - self.least * run.period + 1))
        costs = {start: self._cost(start, run) for start in starts}
        for start in sorted((s for s in starts if costs[s] is not None), key=lambda s: costs[s]):  # type: ignore[arg-type, return-value]
            found = self._matched(start, run)
            if found is not None:
                return found
        return None

    def grouped(self, repeat: Repeat, layers: int) -> Repeat | None:
        """A block of several occurrences of another; None if that does not repeat, or its edges differ.

        Layers that are equal one by one may read values of different earlier layers.
        """
        if layers == 1:
            return repeat
        found = self._matched(repeat.start, Run(repeat.start, repeat.stop, repeat.period * layers))
        return None if found is None else replace(found, layers=layers)

    def _cost(self, start: int, run: Run) -> tuple[int, float] | None:
        """(occurrences lost, values that cross a boundary on average); None if too few boundaries are open."""
        count = (run.stop - start) // run.period
        first, count = self._open_stretch(start, run.period, count)
        if count < self.least:
            return None
        positions = [first + number * run.period for number in range(count + 1)]
        return (run.stop - run.start) // run.period - count, sum(map(self._boundaries.crossing, positions)) / len(
            positions
        )

    def _open_stretch(self, start: int, period: int, count: int) -> tuple[int, int]:
        """The longest stretch of occurrences with open boundaries: its start, and their number."""
        best, first = (start, 0), None
        for number in range(count + 1):
            position = start + number * period
            if not self._boundaries.is_open(position):
                first = None
            elif first is None:
                first = position
            elif (position - first) // period > best[1]:
                best = first, (position - first) // period
        return best

    def _matched(self, start: int, run: Run) -> Repeat | None:
        start, count = self._open_stretch(start, run.period, (run.stop - start) // run.period)
        edges = [self._edges(start + number * run.period, run.period) for number in range(count)]
        first, count = _longest_equal(edges)
        if count < self.least:
            return None
        start += first * run.period
        inputs, outputs = self._inputs(start, run.period, count), self._outputs(start, run.period, count)
        model = next((k for k in range(count) if len({nodes[k] for nodes in inputs}) == len(inputs)), None)
        return None if model is None else Repeat(start, run.period, count, inputs, outputs, model)

    def _edges(self, start: int, period: int) -> tuple[object, ...]:
        """Its region, and for each operand of an occurrence the offset of a call inside, or the kind of a value."""
        calls = self._operands[start : start + period]
        return self._boundaries.regions[start], [
            [self._edge(operand, start) for operand in operands] for operands in calls
        ]

    def _edge(self, operand: fx.Node, start: int) -> object:
        position = self._position.get(operand, -1)
        if position >= start:
            return position - start
        value = operand.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            return str(value)  # as text, because to compare them would add a guard
        return tensor_text(value) if isinstance(value, torch.Tensor) else None

    def _inputs(self, start: int, period: int, count: int) -> tuple[tuple[fx.Node, ...], ...]:
        """Operands from outside; two are one input only if they are the same node in every occurrence."""
        found: dict[tuple[fx.Node, ...], None] = {}
        for offset in range(period):
            for number, operand in enumerate(self._operands[start + offset]):
                if self._position.get(operand, -1) < start:
                    found[tuple(self._operands[start + k * period + offset][number] for k in range(count))] = None
        return tuple(found)

    def _outputs(self, start: int, period: int, count: int) -> tuple[int, ...]:
        return tuple(
            offset
            for offset in range(period)
            if any(self._is_used_outside(start + k * period, offset, period) for k in range(count))
        )

    def _is_used_outside(self, start: int, offset: int, period: int) -> bool:
        inside = range(start, start + period)
        return any(self._position.get(user, -1) not in inside for user in users_of(self._nodes[start + offset]))


def _longest_equal(edges: Sequence[object]) -> tuple[int, int]:
    """The longest stretch of equal items: its first number, and their count."""
    best = first = 0, 0
    for number, found in enumerate(edges):
        same = number > 0 and found == edges[number - 1]
        first = (first[0], first[1] + 1) if same else (number, 1)
        best = max(best, first, key=lambda stretch: stretch[1])
    return best
