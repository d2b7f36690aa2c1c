"""The pass `fuse_linear_cross_entropy`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo.graph.editing import FakeRuns
from kp_dynamo.graph.nodes import calls, fake_of, forward_nodes
from kp_dynamo.passes.base import PassReport, Refusal, rewrite_each
from kp_dynamo.passes.cross_entropy.pattern import Head, head_at
from kp_dynamo.passes.cross_entropy.rewriting import Rewriting

aten = torch.ops.aten

_READERS = (aten.nll_loss_forward.default, aten.gather.default, aten.index.Tensor)
_LANES = 128  # a TPU's tile has 128 columns


@dataclass(frozen=True)
class FuseLinearCrossEntropy:
    """Compute a cross entropy from blocks of the logits: changes numerics, by rounding less often.

        before                                                  after
        mm: f32[6, 9] = aten.mm.default(x, t)                   linear_cross_entropy = kp.linear_cross_entropy(
        _log_softmax: f32[6, 9] = aten._log_softmax.default(        x, w, None, where, 128)
            mm, 1, False)                                       loss: f32[6], statistics: f32[2, 6] = ...
        nll_loss_forward = aten.nll_loss_forward.default(       sum_1: f32[] = aten.sum.default(where_1)
            _log_softmax, target, None, 1, -100)                ...

    The logits of a language model are its largest values: 2 GiB for 4096 tokens and a vocabulary of 128256. A training
    step holds up to three values of that size. The operator computes `block_bytes` of them at a time, and the backward
    computes them again from x and the weight. As long as their exponentials take at most `kept_bytes`, the forward
    computes the logits in one block and saves the exponentials, and the backward reads these.

    Fires on a matmul, any reshapes, slices of rows, upcasts, factors and one soft cap (tanh) of its result,
    `_log_softmax` over the last dimension and `nll_loss_forward`, as F.cross_entropy decomposes, with or without a
    bias, class weights, label smoothing and ignored targets, for every reduction, in inference and in training.

    So do losses that pick one log probability of each row by `gather` or an index, and differences of `logsumexp` and a
    picked logit (`cross_entropy/targets.py`). Log-sum-exps of the same rows, such as those of a z-loss, become the sum
    of the operator's statistics, and their gradient an argument of its backward.

    Logits with another reader, such as a result of the graph or an `argmax`, are computed whole for it, and the loss
    reads them; the backward is the operator's, so their gradient is never whole.

    Refuses, with the reason: logits with another reader and no gradient, where there is nothing to gain; logits with
    another gradient, such as that of a z-loss of other rows; log probabilities with another reader, such as an entropy;
    targets that are computed from the loss; logits that are rounded, upcast to float64, or multiplied by more than 1e3.

    Leaves alone logits of less than `min_bytes`: computing them twice costs a matmul, and at 64 MiB modelled times are
    up to 2% longer, with 9% less memory and 8 to 11% fewer cycles.

    Attributes:
        min_bytes: The smallest logits of a chip, in float32, that are not computed whole.
        block_bytes: The size of a block of a chip's logits, in float32. With more than `max_blocks` of them, blocks are
            larger: a program holds each, and 47 blocks were not compiled in a quarter of an hour.
        max_blocks: The most blocks.
        kept_bytes: The most bytes of exponentials, in bfloat16, that the losses of a graph save for their backward.
        batch_parts: Among how many chips the rows are divided. Otherwise the number of blocks, and the time to compile
            them, would grow with the chips.
    """

    min_bytes: int = 32 << 20
    block_bytes: int = 256 << 20
    max_blocks: int = 16
    kept_bytes: int = 0
    batch_parts: int = 1

    name: ClassVar[str] = "fuse_linear_cross_entropy"

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        forward, runs, left = forward_nodes(gm.graph), FakeRuns(), self.kept_bytes

        def match(reader: fx.Node) -> Head | Refusal | None:
            return head_at(reader, forward) if self._is_large(reader) else None

        def rewrite(head: Head) -> None:
            nonlocal left
            size = _kept_bytes(head)
            is_kept = size is not None and size <= left
            left -= size if is_kept and size else 0
            Rewriting(gm.graph, head, self._block(head), runs, is_kept).run()

        readers = (node for node in calls(gm.graph, *_READERS) if node in forward and not node._erased)
        return rewrite_each(self.name, readers, match, rewrite)

    def _is_large(self, reader: fx.Node) -> bool:
        rows = fake_of(reader.args[0]).shape  # type: ignore[arg-type]
        return 4 * math.prod(hint_int(size, fallback=1) for size in rows) >= self.min_bytes * self.batch_parts

    def _block(self, head: Head) -> int:
        """Columns of a block: a multiple of the lanes, and about as many in each block."""
        rows, num_classes = fake_of(head.chain[-1]).shape[:-1], head.num_classes
        num_rows = math.prod(hint_int(size, fallback=1) for size in rows)
        most = max(self.batch_parts * self.block_bytes // (4 * max(num_rows, 1)), _LANES)
        num_blocks = min(math.ceil(num_classes / most), self.max_blocks)
        return math.ceil(num_classes / num_blocks / _LANES) * _LANES


def _kept_bytes(head: Head) -> int | None:
    """The bytes of the exponentials, in bfloat16; None if the backward cannot read them, or their number is open."""
    rows = fake_of(head.chain[-1]).shape[:-1]
    if head.gradients is None or head.is_read or head.scaling.soft_cap or not all(type(n) is int for n in rows):
        return None
    return 2 * math.prod(rows) * head.num_classes
