"""The pass `gather_weights`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

import kp_dynamo.ops.gathered  # noqa: F401  # registers the operator
from kp_dynamo.graph.editing import cast_to, insert_call
from kp_dynamo.graph.nodes import arguments_at, backward_nodes, calls, fake_of, gradients_of
from kp_dynamo.graph.op_tables import MATMULS, VIEWS_AND_CASTS
from kp_dynamo.graph.weight_matmuls import WEIGHT_MATMULS, has_many_rows, path_to_matmul, path_to_source
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.precision.cast_nodes import is_float32
from kp_dynamo.passes.precision.matmul_rules import ONE_PASS
from kp_dynamo.passes.recompute.tags import tag

kp = torch.ops.kp


@dataclass(frozen=True)
class GatherWeights:
    """On chips that are all along the batch, gather each matmul's weight, and sum each weight's gradient whole.

        before                                                after
        _to_copy: bf16[8, 6] = aten._to_copy(w, dtype=bf16)   _to_copy: bf16[8, 6] = aten._to_copy(w, dtype=bf16)
                                                              gathered: bf16[8, 6] = kp.gathered(_to_copy)
        t: bf16[6, 8] = aten.t(_to_copy)                      t: bf16[6, 8] = aten.t(gathered)
        mm: bf16[4, 8] = aten.mm(x, t)                        mm: bf16[4, 8] = aten.mm(x, t)

    Such chips divide weights ("fsdp") for the memory only. Left to itself, XLA computes some matmuls in loops, whose
    trips send parts of the weight in a ring, and sometimes gathers activations instead of the weight. A gradient that
    is whole for a moment, before the pin of the result divides it, is a reduce-scatter.

    Fires on the weights of mm, addmm, kp::contract and kp::linear_act that are parameters of two dimensions, behind
    casts and views, and on those of their gradients that a matmul computes. `python -m bench.fsdp` has the figures.

    Leaves alone a weight with more elements than what the matmul multiplies it with and its result have together, as in
    decoding: then moving those is less.

    A gathered weight is never saved for the backward. Values do not change, but for the order of sums.

    Attributes:
        parameters: Positions of the arguments that are parameters.
    """

    parameters: tuple[int, ...] = ()

    name: ClassVar[str] = "gather_weights"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        graph = gm.graph
        weights = {node for node in arguments_at(graph, self.parameters) if fake_of(node).dim() == 2}
        gathering = _Gathering(graph, weights)
        for matmul in calls(graph, *WEIGHT_MATMULS):
            for position in MATMULS[matmul.target]:
                gathering.gather_operand(matmul, position)
        for gradient in gradients_of(graph, self.parameters):
            gathering.gather_gradient(gradient)
        return PassReport(self.name, gathering.num_gathered)


class _Gathering:
    """The gathers of a graph.

    Attributes:
        num_gathered: How many there are.
    """

    def __init__(self, graph: fx.Graph, weights: set[fx.Node]) -> None:
        self._graph, self._weights = graph, weights
        self._backward = backward_nodes(graph)
        self._whole: dict[tuple[fx.Node, bool], fx.Node] = {}
        self.num_gathered = 0

    def gather_operand(self, matmul: fx.Node, position: int) -> None:
        """Gather what an operand is a view of, if that is a weight, in its narrowest dtype."""
        path = path_to_source(matmul.args[position])
        if path[-1] not in self._weights or not has_many_rows(matmul, path[0]):
            return
        source = min(reversed(path), key=lambda node: fake_of(node).dtype.itemsize)
        after = path[: path.index(source)]
        whole = self._gathered(source, rounds=is_float32(source) and bool(matmul.meta.get(ONE_PASS)))
        (after[-1] if after else matmul).replace_input_with(source, whole)
        self._recompute(node for node in after if node.target in VIEWS_AND_CASTS)

    def gather_gradient(self, gradient: fx.Node) -> None:
        path = path_to_matmul(gradient)
        if path is None:
            return
        matmul = path[-1]
        with self._graph.inserting_after(matmul):
            whole = self._insert(matmul)
        matmul.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)

    def _gathered(self, source: fx.Node, *, rounds: bool) -> fx.Node:
        """The whole of a value; with `rounds`, of its bfloat16, as the matrix unit would round it."""
        key = source, rounds
        if key not in self._whole:
            first = next(node for node in self._graph.nodes if node.op != "placeholder")
            place = first if source.op == "placeholder" else source.next
            with self._graph.inserting_before(place):
                narrow = cast_to(source, torch.bfloat16, like=None) if rounds else source
                whole = self._insert(narrow)
                wide = cast_to(whole, torch.float32, like=None) if rounds else whole
            self._recompute({narrow, whole, wide} - {source})
            self._whole[key] = wide
        return self._whole[key]

    def _insert(self, source: fx.Node) -> fx.Node:
        self.num_gathered += 1
        like = None if source.op == "placeholder" else source
        return insert_call(self._graph, kp.gathered.default, (source,), {}, like=like)

    def _recompute(self, nodes: Iterable[fx.Node]) -> None:
        tag((n for n in nodes if self._backward and n not in self._backward), CheckpointPolicy.MUST_RECOMPUTE)
