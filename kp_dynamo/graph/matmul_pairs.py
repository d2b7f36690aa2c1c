"""Finds the matmuls of a graph that tensor parallelism can divide: pairs whose values in between need no communication.

A column matmul divides the outputs of its weight among the chips. What follows keeps the division as long as each chip
can compute its part alone: elementwise operators, heads that are taken apart, attention of each head. A row matmul then
sums over the divided dimension, and its result is whole again after one reduction (Megatron-LM, Shoeybi et al. 2019).
Column matmuls whose results meet, such as queries, keys and values, are divided together or not at all.

The graph is that of one sample: then the heads are the first dimension of a batched matmul.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from torch import fx

from kp_dynamo.graph.divided_values import Divided, divided_result
from kp_dynamo.graph.nodes import tensor_of
from kp_dynamo.graph.weight_views import Weight, view_of, weight_matmul

_WHOLE = -1
"""In place of a dimension: what reads the parameter needs all of it."""


def divided_dims(graph: fx.Graph, parameters: Iterable[fx.Node], count: int, least: int) -> dict[fx.Node, int]:
    """The dimension of each parameter that is divided. One that stays whole is not in it.

    Args:
        graph: An ATen graph for a batch of one.
        parameters: Its placeholders that are parameters.
        count: Among how many chips.
        least: Least number of elements of a weight that is divided.
    """
    known, whole = frozenset(parameters), frozenset[fx.Node]()
    while True:
        walk = _Walk(known, count, least, whole)
        for node in graph.nodes:
            walk.visit(node)
        failed = walk.unfinished()
        if failed <= whole:
            return walk.dims()
        whole |= failed


@dataclass
class _Walk:
    """One walk over a graph.

    Attributes:
        parameters: The placeholders that are parameters.
        count: The number of chips.
        least: As above.
        whole: Matmuls that are not divided.
    """

    parameters: frozenset[fx.Node]
    count: int
    least: int
    whole: frozenset[fx.Node]
    _values: dict[fx.Node, Divided] = field(default_factory=dict)
    _weights: dict[fx.Node, Weight] = field(default_factory=dict)
    _uses: dict[fx.Node, dict[int, set[fx.Node]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    _failed: set[fx.Node] = field(default_factory=set)
    _closed: set[fx.Node] = field(default_factory=set)

    def visit(self, node: fx.Node) -> None:
        """Follow the division through one node."""
        if node in self.parameters:
            self._weights[node] = Weight(node, tuple(range(len(_shape(node)))))
        elif (view := view_of(node, self._weights)) is not None:
            self._weights[node] = view
        elif (matmul := weight_matmul(node, self._weights)) is not None:
            self._visit_matmul(node, *matmul)
        elif node.op in ("call_function", "output"):
            self._visit_other(node)

    def unfinished(self) -> set[fx.Node]:
        """The column matmuls that must stay whole: without a row matmul behind them, or with contradicting uses."""
        columns = {c for uses in self._uses.values() for of in uses.values() for c in of}
        contradicting = {c for uses in self._uses.values() if len(uses) > 1 for of in uses.values() for c in of}
        return self._failed | (columns - self._closed) | contradicting

    def dims(self) -> dict[fx.Node, int]:
        """The dimensions that are divided."""
        return {node: dim for node, uses in self._uses.items() for dim in uses if dim != _WHOLE}

    def _visit_matmul(self, node: fx.Node, left: fx.Node, weight: Weight, bias: Weight | None) -> None:
        value, shape = self._values.get(left), tuple(_shape(weight.node))
        rows, columns = weight.dims
        if value is not None and value.dim == 1:
            self._use(weight, rows, value.columns)
            self._closed |= value.columns
        elif value is None and node not in self.whole and self._is_worth_it(shape, columns):
            self._use(weight, columns, {node})
            self._values[node] = Divided(1, frozenset({node}))
            if bias is not None:
                self._use(bias, bias.dims[0], {node})
            return
        else:
            self._failed |= value.columns if value is not None else set()
            self._use(weight, _WHOLE, ())
        if bias is not None:
            self._use(bias, _WHOLE, ())

    def _is_worth_it(self, shape: tuple[int, ...], dim: int) -> bool:
        return prod(shape) >= self.least and shape[dim] % self.count == 0

    def _visit_other(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        columns = frozenset[fx.Node]().union(*(self._values[n].columns for n in operands if n in self._values))
        result = divided_result(node, self._values, self.count) if columns else None
        if result is None:
            self._failed |= columns
        else:
            self._values[node] = result
        for operand in (n for n in operands if n in self._weights):
            dim = None if result is None else result.dim_of(operand, node)
            weight = self._weights[operand]
            self._use(weight, _WHOLE if dim is None else weight.dims[dim], columns if dim is not None else ())

    def _use(self, weight: Weight, dim: int, columns: Iterable[fx.Node]) -> None:
        self._uses[weight.node][dim].update(columns)


def _shape(node: fx.Node) -> tuple[int, ...]:
    value = tensor_of(node)
    assert value is not None, "a parameter is a tensor"
    return tuple(value.shape)
