"""The gradients of `kp::linear_cross_entropy`, by blocks of the logits' columns.

`ops/linear_cross_entropy.py` names the arguments and the sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kp_dynamo.ops.gathered import gathered
from kp_dynamo.ops.logit_blocks import NUM_OPERANDS, Head, keeps
from kp_dynamo.ops.optimization_barrier import held, keeps_barriers


@dataclass(frozen=True)
class _Sent:
    """The gradients of the results of each row, and the weights of the smooth loss."""

    grad: Tensor
    smooth_weights: Tensor | None = None
    smooth_grad: Tensor | None = None
    lse_grad: Tensor | None = None

    def to_logits(self, head: Head, softmax: Tensor, columns: slice) -> Tensor:
        """The derivative of the losses and the log-sum-exp by a block of the scaled logits, before the soft cap."""
        found = (softmax - head.is_target(columns).to(head.dtype)) * self.grad.to(head.dtype)[:, None]
        if self.smooth_weights is not None and self.smooth_grad is not None:
            weights = self.smooth_weights.to(head.dtype)
            found = (
                found
                + (weights.sum() * softmax - head.of_block(weights, columns)) * self.smooth_grad.to(head.dtype)[:, None]
            )
        if self.lse_grad is not None:
            found = found + softmax * self.lse_grad.to(head.dtype)[:, None]
        return found if head.scale == 1 else found * head.scale


@dataclass(frozen=True)
class _Kept:
    """What the backward reads instead of computing the logits again."""

    exponentials: Tensor | None = None
    loss: Tensor | None = None

    def softmax(self, head: Head, columns: slice, log_total: Tensor) -> Tensor:
        """That of the target is not rounded to bfloat16: less 1, it may be small."""
        assert self.exponentials is not None
        assert self.loss is not None
        softmax = head.of_block(self.exponentials, columns, 1).to(head.dtype) * torch.exp(-log_total)[:, None]
        return torch.where(head.is_target(columns), torch.exp(-self.loss)[:, None], softmax)


def gradients(
    grad: Tensor, *arguments: Any, out_dtype: torch.dtype | None = None, parts: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """(d_x, d_weight, d_bias) of the arguments of `kp::linear_cross_entropy_backward`."""
    head, (statistics, *others) = Head.of(*arguments[:NUM_OPERANDS], parts=parts), arguments[NUM_OPERANDS:]
    head, sent, kept = replace(head, x=_in_vector_memory(head.x)), _Sent(grad, *others[:3]), _Kept(*others[3:])
    is_kept = kept.exponentials is not None and keeps(head.x, kept.exponentials.numel() > 0)
    head = head.as_one_block() if is_kept else head
    x, result = head.x.to(head.dtype), out_dtype or head.x.dtype
    d_x, d_weight, d_bias = x.new_zeros((parts, *x.shape) if parts > 1 else x.shape), [], []
    for columns in head.columns():
        if is_kept:
            d_logits = sent.to_logits(head, kept.softmax(head, columns, statistics[1]), columns)
        else:
            logits, d_x = head.logits(columns, after=d_x)
            d_logits = _d_logits(head, logits, columns, statistics, sent)
        # Rounded as the gradient of the logits is where they are whole.
        rounded = d_logits.to(head.x.dtype).to(head.dtype)
        d_x = d_x + _times_weight(head, rounded, head.of_block(head.weight, columns).to(head.dtype))
        d_weight.append((rounded.t() @ x).to(result))
        d_bias.append(d_logits.sum(0))
    d_x = d_x.sum(0) if parts > 1 else d_x
    return d_x.to(result), gathered(head.joined(d_weight)), head.joined(d_bias).to(result)


def _times_weight(head: Head, d_logits: Tensor, weight: Tensor) -> Tensor:
    """The product of a block; that of each part by itself, [parts, N, D], so that chips sum all blocks at once."""
    if head.parts == 1:
        return d_logits @ weight
    by_part = d_logits.unflatten(1, (head.parts, -1)).transpose(0, 1)
    return torch.bmm(by_part, weight.unflatten(0, (head.parts, -1)))


def _in_vector_memory(x: Tensor) -> Tensor:
    """`x`; on a TPU the result of an operation, which may be in vector memory.

    A backward starts with this operator, so there is no time to copy an argument there. Reading [2048, 1024] from HBM
    for every block of rows makes the logits of 32,000 classes cost 1.41 instead of 0.94 ms on a v5e.
    """
    return held(x * held(x.new_ones(()))) if keeps_barriers() else x


def _d_logits(head: Head, logits: Tensor, columns: slice, statistics: Tensor, sent: _Sent) -> Tensor:
    """The derivative by a block of the matmul and bias, whose result `logits` is."""
    capped = head.capped(logits)
    softmax = torch.exp((capped - statistics[0, :, None]) - statistics[1, :, None])
    found = sent.to_logits(head, softmax, columns)
    return found * (1 - torch.square(capped / head.soft_cap)) if head.soft_cap else found
