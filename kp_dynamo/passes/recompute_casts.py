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
from kp_dynamo.passes.precision.casts import is_bfloat16, is_widening
from kp_dynamo.passes.recompute.tags import tag

_cast = torch.ops.aten._to_copy.default
# A clone is in the table of views because it moves no value; it does move bytes.
_FREE_VIEWS = tuple(view for view in VIEWS if view is not torch.ops.aten.clone.default)


@dataclass(frozen=True)
class RecomputeCasts:
    """Tag what a backward computes again for nothing: widened values, views of bfloat16, bfloat16 parameters.

        forward                                              what the partitioner would save    what it saves now
        narrow: bf16[6, 4] = aten._to_copy(x, bf16)
        wide: f32[6, 4] = aten._to_copy(narrow, f32)         wide, twice the bytes              narrow, or x
        t: bf16[4, 8] = aten.t(weight_bf16)                  t, a permuted copy                 weight_bf16
        weight_bf16: bf16[8, 4] = aten._to_copy(weight, ..)  weight_bf16                        nothing: weight is there

    The graph itself stays as it is: the tag is what `torch.utils.checkpoint` writes, `node.meta["recompute"]`, and the
    min-cut partitioner acts on it. torch's own rule never recomputes what a matmul of the backward reads, because a
    kernel of a GPU's library would need it in memory; XLA reads operands through casts and views.

    Tagged are, in the forward part of a joint graph,
    1. a cast from bfloat16 to float32 and nothing else;
    2. a view whose value is bfloat16;
    3. a cast of an input, or of views of one, to bfloat16. Left alone is what carries a tag already: a region of the
       user's own checkpoints. Float32 views stay as well: recomputing them makes the v5e compiler's programs slower
       (gpt training in float32: modelled 3.23 ms against 2.97).

    A saved widened value also costs two more passes over the matrix unit: behind an argument of the program the
    compiler cannot see that bfloat16 holds it. On the v5e compiler (one block and head, D 1024, B 4, S 512, training at
    level balanced, cycles and modelled ms, largest program): gpt 6.06 / 3.55, 553 MiB -> 4.64 / 2.68, 525 MiB; llama
    6.44 / 3.64, 549 -> 4.92 / 2.72, 564; bert 4.20 / 2.30, 392 -> 4.05 / 2.21, 412. Where a program is larger it reads
    the float32 parameter, which is in memory anyway, in the place of a bfloat16 copy, which is not.
    """

    name: ClassVar[str] = "recompute_casts"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        backward = backward_nodes(gm.graph)
        if not backward:
            return PassReport(self.name, 0)
        found = [n for n in calls(gm.graph, _cast, *_FREE_VIEWS) if n not in backward and _is_free(n)]
        return PassReport(self.name, tag(found, CheckpointPolicy.MUST_RECOMPUTE))


def _is_free(node: fx.Node) -> bool:
    """Whether computing a node again costs no more than reading it."""
    if node.target in _FREE_VIEWS:
        return is_bfloat16(node)
    return is_widening(node) or (is_bfloat16(node) and _is_input(node.args[0]))


def _is_input(node: object) -> bool:
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.op == "placeholder" and tensor_of(node) is not None
