"""The pass `gather_weights`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from kp_dynamo.graph.nodes import calls, fake_of, gradients_by_position, inputs_by_position
from kp_dynamo.graph.op_tables import CROSS_ENTROPIES, MATMULS
from kp_dynamo.graph.weight_matmuls import WEIGHT_MATMULS, DividedWeight
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.weights.gathering import Gathering


@dataclass(frozen=True)
class GatherWeights:
    """Chips along the batch gather each matmul's weight, and sum each weight's gradient whole.

        before                                                after
        _to_copy: bf16[8, 6] = aten._to_copy(w, dtype=bf16)   _to_copy: bf16[8, 6] = aten._to_copy(w, dtype=bf16)
                                                              gathered: bf16[8, 6] = kp.gathered(_to_copy)
        t: bf16[6, 8] = aten.t(_to_copy)                      t: bf16[6, 8] = aten.t(gathered)
        mm: bf16[4, 8] = aten.mm(x, t)                        mm: bf16[4, 8] = aten.mm(x, t)

    Such chips divide weights ("fsdp") for the memory only. Left to itself, XLA computes some matmuls in loops, whose
    trips send parts of the weight in a ring, and sometimes gathers activations instead of the weight. A gradient that
    is whole for a moment, before the pin of the result divides it, is a reduce-scatter.

    On a mesh with other axes ("fsdp+tensor"), these still divide the weight, the gradient, and so the matmul:

        gathered: bf16[8, 6] = kp.gathered(_to_copy, "model,")

    Fires on the weights of mm, addmm, kp::contract and kp::linear_act that are parameters of two dimensions, behind
    casts and views, and on those of their gradients that a matmul computes. `python -m bench.fsdp` has the figures.

    Leaves alone a weight with more elements than what the matmul multiplies it with and its result have together, as in
    decoding: then moving those is less. Also leaves alone a weight whose other parts do not divide a dimension of what
    the matmul reads or computes, such as 8 parts of 4 heads.

    A gathered weight is never saved for the backward. Values do not change, but for the order of sums.

    Attributes:
        weights: The arguments that are parameters.
        num_parts: Among how many chips the other axes divide.
    """

    weights: tuple[DividedWeight, ...] = ()
    num_parts: int = 1

    name: ClassVar[str] = "gather_weights"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        graph = gm.graph
        arguments, gradients = inputs_by_position(graph), gradients_by_position(graph)
        weights = {arguments[w.position]: w for w in self.weights if w.position in arguments}
        gathering = Gathering(graph, {n: w for n, w in weights.items() if fake_of(n).dim() == 2}, self.num_parts)
        for matmul in calls(graph, *WEIGHT_MATMULS):
            for position in MATMULS[matmul.target]:
                gathering.gather_operand(matmul, position)
        for loss in calls(graph, *CROSS_ENTROPIES):
            gathering.gather_head(loss)
        for weight in self.weights:
            if weight.position in gradients:
                gathering.gather_gradient(gradients[weight.position], weight)
        return PassReport(self.name, gathering.num_gathered)
