"""The pass `divide_heads`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from kp_dynamo.graph.nodes import calls, fake_of
from kp_dynamo.ops.attention_args import AttentionArgs
from kp_dynamo.passes.attention.backwards import backwards_of
from kp_dynamo.passes.attention.head_order import HeadOrder
from kp_dynamo.passes.attention.reordering import Reordering
from kp_dynamo.passes.base import PassReport, Refusal, rewrite_each

kp = torch.ops.kp


@dataclass(frozen=True)
class DivideHeads:
    """On a mesh that divides heads, put the sequences and heads of each chip side by side for `kp::attention`.

        before                                             after
        view: f32[8, 6, 4] = aten.view(q, [8, 6, 4])       reshape: f32[2, 1, 2, 2, 6, 4] = aten.reshape(q, [2, 1, ...])
                                                           permute: f32[2, 2, 1, 2, 6, 4] = aten.permute(reshape, ...)
                                                           reshape_1: f32[8, 6, 4] = aten.reshape(permute, [8, 6, 4])
        attention: f32[8, 6, 4] = kp.attention(view, ...)  attention: f32[8, 6, 4] = kp.attention(reshape_1, ...)

    The operator has one dimension for sequences and heads, q [B * H, S, D]. If the batch is divided along one axis of
    the mesh and heads along another, the parts of a chip are not neighbours in it, so XLA would gather all heads on
    each chip, which would compute them all. In the order (chips along the batch, chips along the heads, sequences of a
    chip, heads of a chip) they are neighbours, and nothing moves.

    1. Fires on kp::attention and kp::attention_train with their backwards. Keys and values that heads share, masks,
       sinks and dropout take the same order. Results return to theirs.

    Refuses, with the reason

    2. a batch or heads that do not divide among the chips, and symbolic ones;
    3. a learned bias, whose gradient is a sum over the batch.

    Values do not change.

    Attributes:
        batch_parts: Among how many chips the batch is divided.
        head_parts: Among how many chips heads are divided.
    """

    batch_parts: int = 1
    head_parts: int = 1

    name: ClassVar[str] = "divide_heads"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        attentions = calls(gm.graph, kp.attention.default, kp.attention_train.default)
        return rewrite_each(self.name, attentions, self._match, Reordering.run)

    def _match(self, attention: fx.Node) -> Reordering | Refusal | None:
        backwards = backwards_of(attention)
        if any(node.target is kp.attention_backward.bias for node in backwards):
            return Refusal(attention, "a learned bias, whose gradient is a sum over the batch")
        args = AttentionArgs.of(attention)
        shapes = [tuple(fake_of(x).shape) for x in (*args.operands, *args.scoring.masks)]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            return Refusal(attention, f"symbolic sizes of its queries: {', '.join(map(str, shapes[0]))}")
        batch = _batch_of(args)
        if batch is None:
            return Refusal(attention, "it is not known what of its first dimension are sequences, and what heads")
        order = HeadOrder(batch, self.batch_parts, self.head_parts)
        heads = [shape[0] // batch for shape in shapes[:2]]
        if batch % self.batch_parts or any(number % self.head_parts for number in heads):
            return Refusal(
                attention,
                f"{batch} sequences of {heads[0]} heads, with {heads[1]} of keys, do not divide among "
                f"{self.batch_parts} x {self.head_parts} chips",
            )
        return Reordering(order, attention, backwards)


def _batch_of(args: AttentionArgs) -> int | None:
    """The number of sequences: by the masks, or else by what the queries are a view of."""
    dims = args.scoring.batch_dims
    if len(dims) == 2 and isinstance(dims[0], int):
        return dims[0]
    return None if dims else HeadOrder.batch_before(args.q)
