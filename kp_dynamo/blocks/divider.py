"""Divides Dynamo's graph: what precedes the first block, each block once, what stands between and after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from kp_dynamo.blocks.block_search import Accept, BlockSearch
from kp_dynamo.blocks.boundaries import Boundaries
from kp_dynamo.blocks.division import Division, Piece, Undivided
from kp_dynamo.blocks.matching import Matcher, Repeat
from kp_dynamo.blocks.near_repeats import nearest_difference
from kp_dynamo.blocks.node_effects import EffectsOfNodes, operands_of, users_of
from kp_dynamo.blocks.node_ids import node_ids
from kp_dynamo.blocks.pieces import input_like, piece_graph
from kp_dynamo.blocks.regions import regions
from kp_dynamo.blocks.schedule import Constant, PieceCall, with_dead_values
from kp_dynamo.blocks.symbolic_sizes import sizes_for, symbols_of
from kp_dynamo.blocks.whole_graphs import CALLS, to_divide
from kp_dynamo.capture.capture import Capture, piece_capture
from kp_dynamo.graph.module_paths import module_of, repeated_modules


@dataclass(frozen=True)
class FoundBlocks:
    """The repeated blocks of a graph that can be divided at them.

    Attributes:
        repeats: The blocks, in the order of the graph.
        matcher: Compares the edges of what repeats.
        divider: Makes a divider of the graph.
    """

    repeats: Sequence[Repeat]
    matcher: Matcher
    divider: Callable[[], Divider]

    def division(self, layers: int = 1) -> Division | Undivided:
        """The graph as pieces, each with this number of equal layers; what is left over belongs to the next piece."""
        grouped = (self.matcher.grouped(repeat, layers) for repeat in self.repeats)
        repeats = [repeat for repeat in grouped if repeat is not None]
        if not repeats:
            most = max(repeat.count for repeat in self.repeats)
            return Undivided(f"no {layers} of its {most} equal layers repeat {self.matcher.least} times")
        return self.divider().divided(repeats)


def find_blocks(capture: Capture, accept: Accept, *, least: int, with_modules: bool) -> FoundBlocks | Undivided:
    """The repeated blocks of a captured graph.

    Args:
        capture: The graph.
        accept: Decides about each block.
        least: Least number of occurrences of a block.
        with_modules: Whether equal layers with different module paths are different blocks.
    """
    prepared = to_divide(capture)
    if isinstance(prepared, str):
        return Undivided(prepared)
    capture = prepared
    graph = capture.gm.graph
    nodes = [node for node in graph.nodes if node.op in CALLS]
    ids = node_ids(capture.gm, nodes, with_modules=with_modules)
    effects = EffectsOfNodes(capture.gm, dict(zip(nodes, ids, strict=True)))
    boundaries = Boundaries(graph, nodes, effects, regions(nodes), capture.inputs)
    matcher = Matcher(nodes, boundaries, least)
    found = BlockSearch(nodes, ids, matcher, effects, accept).repeats()
    if not found:
        return Undivided(
            f"no stretch of its {len(nodes)} operators repeats {least} times and can be compiled by itself"
            f"{nearest_difference(nodes, ids, boundaries)}"
        )
    return FoundBlocks(found, matcher, partial(Divider, capture, nodes, effects, boundaries, with_modules=with_modules))


class Divider:
    """Builds the pieces and the steps.

    Attributes:
        passes_on_device: Whether values may stay on the device between pieces while the user's tensors are on the CPU.
    """

    passes_on_device = True

    def __init__(
        self,
        capture: Capture,
        nodes: Sequence[fx.Node],
        effects: EffectsOfNodes,
        boundaries: Boundaries,
        *,
        with_modules: bool,
    ) -> None:
        self._capture, self._nodes, self._effects, self._boundaries = capture, nodes, effects, boundaries
        self._with_modules = with_modules
        self._position = {node: i for i, node in enumerate(nodes)}
        self._inputs = capture.gm.graph.find_nodes(op="placeholder")
        self._number = {node: i for i, node in enumerate((*self._inputs, *nodes))}
        self._pieces: list[Piece] = []
        self._steps: list[PieceCall] = []

    def divided(self, repeats: Sequence[Repeat]) -> Division | Undivided:
        done = 0
        for repeat in repeats:
            self._add_rest(done, repeat.start)
            self._add_blocks(repeat)
            done = repeat.stop
        return self._finished(done)

    def _finished(self, done: int) -> Division | Undivided:
        """The division, with what stands after the last block."""
        self._add_rest(done, len(self._nodes))
        if any(self._passes_written_twice(step) for step in self._steps):
            return Undivided("a block writes to one of its inputs, and gets one tensor as two of them")
        results: Any = self._capture.gm.graph.output_node().args[0]
        returned = [self._number[r] if isinstance(r, fx.Node) else Constant(r) for r in results]
        written = tuple(self._number[node] for node in self._boundaries.written)
        return Division(tuple(self._pieces), with_dead_values(self._steps, returned), written)

    def _add_rest(self, start: int, stop: int) -> None:
        """What is no block."""
        nodes = self._nodes[start:stop]
        outputs = self._outputs(start, stop)
        if not outputs and not any(self._effects[node].writes for node in nodes):
            return
        operands = [operand for node in nodes for operand in operands_of(node)]
        outside = [n for n in operands if not start <= self._position.get(n, -1) < stop]
        inputs = list(dict.fromkeys([*self._sizes([*nodes, *outside]), *outside]))
        passed = frozenset(i for i, node in enumerate(inputs) if node in self._position)
        self._add_piece(start, stop, (inputs, outputs), passed, (start,))
        self._add_step(inputs, outputs)

    def _outputs(self, start: int, stop: int) -> list[fx.Node]:
        """The values that are used outside."""
        nodes = self._nodes[start:stop]
        return [n for n in nodes if any(not start <= self._position.get(u, -1) < stop for u in users_of(n))]

    def _add_blocks(self, repeat: Repeat) -> None:
        first = repeat.start + repeat.model * repeat.period
        inputs = self._with_sizes(repeat, self._nodes[first : first + repeat.period])

        def values(number: int) -> tuple[list[fx.Node], list[fx.Node]]:
            first = repeat.start + number * repeat.period
            return [nodes[number] for nodes in inputs], [self._nodes[first + o] for o in repeat.outputs]

        computed = (any(node in self._position for node in nodes) for nodes in inputs)
        passed = frozenset(i for i, is_computed in enumerate(computed) if is_computed)
        starts = range(repeat.start, repeat.stop, repeat.period // repeat.layers)
        self._add_piece(first, first + repeat.period, values(repeat.model), passed, starts, layers=repeat.layers)
        for number in range(repeat.count):
            self._add_step(*values(number))

    def _with_sizes(self, repeat: Repeat, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, ...]]:
        """The inputs of a block, with the sizes of its values first."""
        sizes = self._sizes([*nodes, *(inputs[repeat.model] for inputs in repeat.inputs)])
        return list(dict.fromkeys([*((size,) * repeat.count for size in sizes), *repeat.inputs]))

    def _sizes(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The inputs of the graph that AOTAutograd needs to express the sizes of values."""
        return sizes_for(self._inputs, symbols_of(nodes))

    def _add_step(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> None:
        given, computed = (tuple(self._number[node] for node in nodes) for nodes in (inputs, outputs))
        self._steps.append(PieceCall(len(self._pieces) - 1, given, computed))

    def _add_piece(
        self,
        start: int,
        stop: int,
        values: tuple[Sequence[fx.Node], Sequence[fx.Node]],
        passed: frozenset[int],
        starts: Sequence[int],
        *,
        layers: int = 1,
        call: fx.Node | None = None,
    ) -> None:
        """Add what the calls from `start` to `stop` compute; `starts` are those of each layer of all its runs."""
        nodes, (inputs, outputs), regions = self._nodes[start:stop], values, self._boundaries.regions
        gm = piece_graph(self._capture.gm, nodes, inputs, outputs, (regions[start], regions[stop]))
        stays = self.passes_on_device and self._capture.mode == "cpu" and not self._capture.records_gradients
        examples = [self._example(node) for node in inputs]
        capture = piece_capture(self._capture, gm, examples, passed, stays=stays, with_modules=self._with_modules)
        effects = tuple(self._effects[node] for node in nodes)
        modules = repeated_modules([self._nodes[first : first + len(nodes) // layers] for first in starts])
        runs = len(starts) // layers
        self._pieces.append(Piece(capture, len(nodes), runs, layers, module_of(nodes[0]), modules, effects, call))

    def _example(self, node: fx.Node) -> Any:
        if node in self._position:
            return input_like(node)
        return self._capture.inputs[self._number[node]]

    def _passes_written_twice(self, step: PieceCall) -> bool:
        writes = any(effects.writes for effects in self._pieces[step.piece].effects)
        return writes and len(set(step.inputs)) < len(step.inputs)
