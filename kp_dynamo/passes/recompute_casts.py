"""The pass `recompute_casts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.nodes import backward_nodes, calls, tensor_of
from kp_dynamo.graph.op_tables import VIEWS
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.precision.cast_nodes import is_bfloat16, is_upcast
from kp_dynamo.passes.recompute.tags import tag

_cast = torch.ops.aten._to_copy.default
# The table of views includes clone, which keeps values but copies bytes.
_FREE_VIEWS = tuple(view for view in VIEWS if view is not torch.ops.aten.clone.default)


@dataclass(frozen=True)
class RecomputeCasts:
    """Tag values that a backward recomputes for free: upcasts, views of bfloat16, bfloat16 parameters.

        forward                                              what the partitioner would save    what it saves now
        narrow: bf16[6, 4] = aten._to_copy(x, bf16)
        wide: f32[6, 4] = aten._to_copy(narrow, f32)         wide, twice the bytes              narrow, or x
        t: bf16[4, 8] = aten.t(weight_bf16)                  t, a permuted copy                 weight_bf16
        weight_bf16: bf16[8, 4] = aten._to_copy(weight, ..)  weight_bf16                        nothing: weight is there

    The pass leaves the graph unchanged. The tag is that of `torch.utils.checkpoint`, `node.meta["recompute"]`, and the
    min-cut partitioner acts on it. torch's own rule never recomputes operands of the backward's matmuls, because a GPU
    library's kernel would need them in memory; XLA reads operands through casts and views.

    In the forward part of a joint graph the pass tags

    1. plain casts from bfloat16 to float32;
    2. views whose value is bfloat16;
    3. casts of an input, or of views of one, to bfloat16.

    It skips nodes that have a tag already, from the user's own checkpoints. It also skips float32 views: recomputing
    them makes the v5e compiler's programs slower (gpt training in float32: modelled 3.23 ms against 2.97).

    A saved upcast value also costs two more passes over the matrix unit, because the compiler cannot see that bfloat16
    represents an argument of the program. On the v5e compiler (one block and head, D 1024, B 4, S 512, training at
    level balanced, cycles and modelled ms, largest program): gpt 6.06 / 3.55, 553 MiB -> 4.64 / 2.68, 525 MiB; llama
    6.44 / 3.64, 549 -> 4.92 / 2.72, 564; bert 4.20 / 2.30, 392 -> 4.05 / 2.21, 412. A program that becomes larger reads
    the float32 parameter, which is in memory anyway, instead of a bfloat16 copy, which is not.
    """

    name: ClassVar[str] = "recompute_casts"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        backward = backward_nodes(gm.graph)
        if not backward:
            return PassReport(self.name, 0)
        found = [n for n in calls(gm.graph, _cast, *_FREE_VIEWS) if n not in backward and _is_free(n)]
        return PassReport(self.name, tag(found, CheckpointPolicy.MUST_RECOMPUTE))


def _is_free(node: fx.Node) -> bool:
    """Whether recomputing a node costs no more than reading it."""
    if node.target in _FREE_VIEWS:
        return is_bfloat16(node)
    return is_upcast(node) or (is_bfloat16(node) and _is_input(node.args[0]))


def _is_input(node: object) -> bool:
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "placeholder" and tensor_of(node) is not None
