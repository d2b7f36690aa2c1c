"""The losses of `kp::linear_cross_entropy`, by blocks of the logits' columns.

`ops/linear_cross_entropy.py` names the arguments and the sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.gathered import gathered
from kp_dynamo.ops.optimization_barrier import keeps_barriers

NUM_OPERANDS = 7  # of a `Head`


@dataclass(frozen=True)
class Head:
    """The operands of both operators: what logits are computed from.

    Several chips may divide the classes into equal parts. A block then has the same classes of each part, so that no
    chip waits for another one, or needs its part of the weight.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    scale: float
    soft_cap: float
    block: int
    parts: int = 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return compute_dtype(self.x.dtype)

    @classmethod
    def of(cls, *operands: Any, parts: int = 1) -> Head:
        """From the operands of an operator; chips along the batch gather a weight that they divide."""
        head = cls(*operands)
        return replace(head, weight=gathered(head.weight), parts=parts)

    def as_one_block(self) -> Head:
        return replace(self, block=self.weight.shape[0])

    def columns(self) -> list[slice]:
        """The classes of each block, counted from the first one of each part."""
        size, step = self.weight.shape[0] // self.parts, max(1, self.block // self.parts)
        return [slice(start, min(start + step, size)) for start in range(0, size, step)]

    def of_block(self, x: Tensor, columns: slice, dim: int = 0) -> Tensor:
        """What a tensor with all classes along a dimension has for those of a block."""
        if self.parts == 1:
            return x[(slice(None),) * dim + (columns,)]
        by_part: Tensor = x.unflatten(dim, (self.parts, -1))
        return by_part[(slice(None),) * (dim + 1) + (columns,)].flatten(dim, dim + 1)

    def joined(self, blocks: Sequence[Tensor]) -> Tensor:
        """What blocks computed for their classes, for all classes in order."""
        if self.parts == 1:
            return torch.cat(list(blocks))
        return torch.cat([block.unflatten(0, (self.parts, -1)) for block in blocks], 1).flatten(0, 1)

    def logits(self, columns: slice, after: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of a block before the soft cap, and `after`: the block waits for that value.

        Otherwise the TPU's scheduler computes several blocks before it reads one.
        """
        x = self.x
        if keeps_barriers() and columns.start:
            x, after = torch.ops.kp.optimization_barrier([x], after)
        # The TPU's compiler folds the upcasts back into the matmul: one pass over the MXU, with a float32 result.
        logits = x.to(self.dtype) @ self.of_block(self.weight, columns).to(self.dtype).t()
        if self.bias is not None:
            logits = logits + self.of_block(self.bias, columns).to(self.dtype)
        return (logits if self.scale == 1 else logits * self.scale), after

    def capped(self, logits: Tensor) -> Tensor:
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def is_target(self, columns: slice) -> Tensor:
        """Where the target of a row is, [N, columns]."""
        if self.parts == 1:
            classes = torch.arange(columns.start, columns.stop, device=self.x.device)
        else:
            classes = self.of_block(torch.arange(self.weight.shape[0], device=self.x.device), columns)
        return classes == self.target[:, None]


@dataclass
class _SmoothSum:
    """The running sum of class weights times logits, less the shift of the sum of the exponentials.

    Attributes:
        seen: The sum of the weights of the classes so far.
        total: Of each row, the sum over those classes of weight * (logit - shift).
    """

    weights: Tensor
    seen: Tensor
    total: Tensor
    shift: Tensor

    @classmethod
    def of(cls, head: Head, weights: Tensor | None = None) -> _SmoothSum | None:
        if weights is None:
            return None
        rows = head.x.new_zeros(head.target.shape, dtype=head.dtype)
        return cls(weights.to(head.dtype), head.x.new_zeros((), dtype=head.dtype), rows, rows)

    def add(self, logits: Tensor, weights: Tensor, shift: Tensor) -> None:
        """A block of logits, and the weights of its classes."""
        block = ((logits - shift[:, None]) * weights).sum(1)
        self.total = self.total + self.seen * (self.shift - shift) + block
        self.seen, self.shift = self.seen + weights.sum(), shift


def keeps(x: Tensor, keep: bool) -> bool:
    """Whether the forward keeps exponentials. In float32 the rounding to bfloat16 would add to the error."""
    return keep and x.dtype == torch.bfloat16


def losses(*arguments: Any, keep: bool = False, parts: int = 1) -> tuple[Tensor, ...]:
    """(loss, statistics, smooth_loss, exponentials) of the arguments of `kp::linear_cross_entropy`."""
    head = Head.of(*arguments[:NUM_OPERANDS], parts=parts)
    is_kept, kept = keeps(head.x, keep), head.x.new_empty(0, dtype=torch.bfloat16)
    head = head.as_one_block() if is_kept else head
    smooth = _SmoothSum.of(head, *arguments[NUM_OPERANDS:])
    most = head.x.new_full(head.target.shape, -math.inf, dtype=head.dtype)
    total, chosen = torch.zeros_like(most), torch.zeros_like(most)
    for columns in head.columns():
        logits, total = head.logits(columns, after=total)
        logits = head.capped(logits)
        higher = torch.maximum(most, logits.amax(1))
        # Of a row whose logits are -inf so far, nothing is subtracted: -inf less itself is NaN.
        shift = torch.where(higher == -math.inf, 0.0, higher)
        exponentials = torch.exp(logits - shift[:, None])
        total = total * torch.exp(most - shift) + exponentials.sum(1)
        if is_kept:
            kept = exponentials.to(torch.bfloat16)
        chosen = chosen + torch.where(head.is_target(columns), logits, 0.0).sum(1)
        if smooth is not None:
            smooth.add(logits, head.of_block(smooth.weights, columns), shift)
        most = higher
    # The difference is exact where the target is likely; a sum of the statistics would round away the loss.
    log_total = torch.log(total)
    smooth_loss = most.new_empty(0) if smooth is None else smooth.seen * log_total - smooth.total
    return (most - chosen) + log_total, torch.stack((most, log_total)), smooth_loss, kept
