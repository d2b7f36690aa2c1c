"""Estimates which values of a program have memory.

These rules approximate what XLA does to a graph:

1. A view has no memory of its own, and a constant takes none.
2. A pointwise result is fused away if it is small, has one reader, or has only pointwise ops and reductions as readers.
3. A softmax or norm needs its operands in memory. Its readers recompute its result; only matmuls read it from memory.
4. A matmul is fused with the pointwise work that is its only reader. A fusion takes at most six operands. If that work
   is also reduced (the gradient of a bias), the matmul is materialized, at the width at which it was reduced.
5. A float32 value that only matmuls read is kept in bfloat16 if matmuls take one pass over the matrix unit.
6. What waits for a gradient (`kp::optimization_barrier`) does not run before that gradient exists.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.graph.op_tables import is_one_of, is_pointwise
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.graph.waiting import WAITS, values_of, waited_for

aten, kp = torch.ops.aten, torch.ops.kp

_SMALL = 1 << 14
_MAX_OPERANDS = 6  # of a fusion that each of its readers recomputes
MATMUL_PACKETS = (
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, kp.linear_act, kp.linear_act_train, kp.contract,
)  # fmt: skip
_REDUCTIONS = (
    aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean, aten.argmax, aten.any, aten.all, aten.prod,
    aten.logsumexp,
)  # fmt: skip
_SOFTMAX_BACKWARDS = (aten._softmax_backward_data, aten._log_softmax_backward_data)
# These ops read only the shape of their operand.
_CREATIONS = (aten.full_like, aten.zeros_like, aten.ones_like, aten.empty_like, aten.new_zeros, aten.new_full)
# A reduction and pointwise work on the same operands, which must be in memory; readers recompute the result.
_READ_TWICE = (
    aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data,
    aten.native_layer_norm,
)  # fmt: skip


class Buffers:
    """The values of a graph that have memory.

    Attributes:
        sizes: Value that has memory -> its bytes, in graph order.
        results: Those that the graph returns.
        result_bytes: Bytes of everything that the graph returns, except inputs.
    """

    def __init__(self, graph: fx.Graph, narrow_matmuls: bool) -> None:
        self._owner: dict[fx.Node, fx.Node] = {}
        self._waits: dict[fx.Node, fx.Node] = {}  # output of a gate -> the gradient it waits for
        for node in graph.nodes:
            self._owner[node] = self._owner_of(node)
        self._readers = self._all_readers(graph)
        output = graph.output_node()
        self.results = {self._owner[n] for n in output.all_input_nodes if n.op != "placeholder"}
        self.result_bytes = sum(node_bytes(n) for n in output.all_input_nodes if n.op != "placeholder")
        self._narrow = narrow_matmuls
        self._needs: dict[fx.Node, set[fx.Node]] = {}
        self.sizes: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if self._has_memory(node):
                self.sizes[node] = self._size(node)

    def _owner_of(self, node: fx.Node) -> fx.Node:
        """The node whose memory holds a node's value."""
        if node.op != "call_function" or not node.all_input_nodes:
            return node
        source = node.all_input_nodes[0]
        through = waited_for(node)
        if through is not None:
            if source.target is kp.optimization_barrier.default:
                self._waits[node] = values_of(source)[-1]
            return self._owner[through]
        is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
        return self._owner[source] if is_view else node

    def _all_readers(self, graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
        readers: dict[fx.Node, list[fx.Node]] = {n: [] for n in graph.nodes}
        for node in graph.nodes:
            is_call = node.op == "call_function" and self._owner[node] is node
            if is_call and node.target not in WAITS and not is_one_of(node, _CREATIONS):
                for owner in dict.fromkeys(self._owner[s] for s in node.all_input_nodes):
                    readers[owner].append(node)
        return readers

    def _has_memory(self, node: fx.Node) -> bool:
        if node.op != "call_function" or self._owner[node] is not node or node.target in WAITS:
            return False
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        is_long = node_bytes(node) >= _SMALL and len(self.read_by(node)) > _MAX_OPERANDS
        return is_long or not self._is_fused_away(node)

    def _is_fused_away(self, node: fx.Node) -> bool:
        if node in self.results:
            return False
        if node_bytes(node) < _SMALL or not node.all_input_nodes or is_one_of(node, _CREATIONS):
            return True
        readers = self._readers[node]
        if any(self._reads_twice(r, node) for r in readers):
            return False
        if is_one_of(node, MATMUL_PACKETS):
            return len(readers) == 1 and is_pointwise(readers[0])
        made_by = node.args[0] if node.target is operator.getitem else node
        assert isinstance(made_by, fx.Node)
        if not is_pointwise(made_by) and not is_one_of(made_by, _READ_TWICE):
            return False
        if all(is_one_of(r, MATMUL_PACKETS) for r in readers) and self._is_normed(node):
            return False
        return len(readers) == 1 or all(is_pointwise(r) or is_one_of(r, _REDUCTIONS) for r in readers)

    def _reads_twice(self, reader: fx.Node, node: fx.Node) -> bool:
        """Whether a reader reduces a value and reads it again; probabilities are recomputed from their scores."""
        if not is_one_of(reader, _READ_TWICE):
            return False
        is_probabilities = is_one_of(reader, _SOFTMAX_BACKWARDS) and self._owner[reader.all_input_nodes[0]] is not node
        return not is_probabilities

    def _is_normed(self, node: fx.Node) -> bool:
        """Whether a value is pointwise work on a softmax or norm: too expensive to recompute in a matmul."""
        while is_pointwise(node) or self._owner[node] is not node:
            source = next(
                (self._owner[s] for s in node.all_input_nodes if node_bytes(s) >= node_bytes(node) // 2), None
            )
            if source is None or source.op != "call_function":
                return False
            node = source
        made_by = node.args[0] if node.target is operator.getitem else node
        return isinstance(made_by, fx.Node) and is_one_of(made_by, _READ_TWICE)

    def _size(self, node: fx.Node) -> int:
        readers = self._readers[node]
        is_narrow = self._narrow and readers and all(is_one_of(r, MATMUL_PACKETS) for r in readers)
        is_wide = isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dtype == torch.float32
        own = node_bytes(node) // (2 if is_narrow and is_wide and node not in self.results else 1)
        return max(own, self._widest_reduced(node, own, is_reduced=False))

    def _widest_reduced(self, node: fx.Node, widest: int, *, is_reduced: bool) -> int:
        """Bytes of the widest value between a matmul and a node that it is fused with, if one of them is reduced.

        0 if none is reduced, or if no matmul leads to the node.
        """
        if is_one_of(node, MATMUL_PACKETS):
            return widest if is_reduced else 0
        if not is_pointwise(node) or (widest and node in self.sizes):
            return 0
        is_reduced = is_reduced or any(is_one_of(r, _REDUCTIONS) for r in self._readers[node])
        widest = max(widest, node_bytes(node))
        sources = [self._owner[s] for s in node.all_input_nodes if s.op == "call_function"]
        return max((self._widest_reduced(s, widest, is_reduced=is_reduced) for s in sources), default=0)

    def read_by(self, node: fx.Node) -> set[fx.Node]:
        """Buffers that must exist when a node runs, including those that its fused operands read."""
        return set().union(*(self._reached(s) for s in _with_waits(node, self._waits)))

    def _reached(self, node: fx.Node) -> set[fx.Node]:
        owner = self._owner[node]
        if owner in self.sizes:
            return {owner}
        if owner.op == "placeholder":
            return set()
        if owner not in self._needs:
            self._needs[owner] = self.read_by(owner)
        return self._needs[owner]


def _with_waits(node: fx.Node, waits: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    for source in node.all_input_nodes:
        yield source
        if source in waits:
            yield waits[source]
