"""How gradients flow through a backward graph: what many results need, and where little of it is passed on."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from torch import fx

from kp_dynamo.graph.nodes import backward_nodes
from kp_dynamo.graph.op_tables import VIEWS_AND_CASTS
from kp_dynamo.graph.waiting import waited_for


class GradientFlow:
    """The nodes of a backward graph that depend on a tangent.

    Attributes:
        shared: Those that several results need, in graph order.
        results: Result that nothing else needs, and that waits for nothing -> the place in `shared` of the last node
            that it needs.
    """

    def __init__(self, graph: fx.Graph) -> None:
        backward = backward_nodes(graph)
        self._nodes = [node for node in graph.nodes if node in backward]
        self._output = graph.output_node()
        feeds = self._results_that_need()
        self.shared = [node for node in self._nodes if feeds[node].bit_count() > 1]
        self._places = {node: place for place, node in enumerate(self.shared)}
        self.results = {node: place for node, place in self._own_results().items() if waited_for(node) is None}

    def _results_that_need(self) -> dict[fx.Node, int]:
        """For each node, the results that it feeds, as bits."""
        bits = {node: 1 << i for i, node in enumerate(self._output.all_input_nodes)}
        feeds: defaultdict[fx.Node, int] = defaultdict(int)
        for node in reversed(self._nodes):
            for user in node.users:
                feeds[node] |= bits[node] if user is self._output else feeds[user]
        return feeds

    def _own_results(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for node in self._nodes:
            last[node] = self._places.get(node, max((last.get(s, -1) for s in node.all_input_nodes), default=-1))
        return {node: last[node] for node in self._output.all_input_nodes if node in last and node not in self._places}

    def narrow_places(self) -> list[tuple[int, fx.Node]]:
        """The places in `shared` after which a single value and its views and casts are passed on, each with the value.

        Of places with the same value only the last counts.
        """
        found: dict[fx.Node, int] = {}
        passed_on: dict[fx.Node, int] = {}
        for place, node in enumerate(self.shared):
            # A tangent counts from its first reader on.
            known = (*self._sources(node), *([] if node.op == "placeholder" else [node]))
            passed_on.update((self._root(n), self._last_reads.get(self._root(n), -1)) for n in known)
            passed_on = {root: last for root, last in passed_on.items() if last > place}
            if len(passed_on) == 1:
                found[next(iter(passed_on))] = place
        return sorted((place, value) for value, place in found.items())

    def read_after(self, place: int, value: fx.Node) -> tuple[fx.Node, ...]:
        """What shared nodes after `place` read of a value from before it: the value itself, and views and casts."""
        reads = {source: None for node in self.shared[place + 1 :] for source in self._sources(node)}
        return tuple(node for node in reads if self._places[node] <= place and self._root(node) is value)

    @cached_property
    def _last_reads(self) -> dict[fx.Node, int]:
        """Root -> the place of its last reader."""
        found: dict[fx.Node, int] = {}
        for place, node in enumerate(self.shared):
            found.update((self._root(source), place) for source in self._sources(node))
        return found

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """The shared nodes that a node reads."""
        return [source for source in node.all_input_nodes if source in self._places]

    def _root(self, node: fx.Node) -> fx.Node:
        """The value that a shared node is a view or a cast of."""
        while True:
            source = waited_for(node)
            if source is None and node.target in VIEWS_AND_CASTS:
                source = node.all_input_nodes[0]
            if source is None or source not in self._places:
                return node
            node = source
