"""The mathematics of `kp::linear_cross_entropy`, by blocks of the logits' columns.

`ops/linear_cross_entropy.py` names the arguments and the sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.optimization_barrier import held, keeps_barriers

NUM_OPERANDS = 7  # of a `Head`


@dataclass(frozen=True)
class Head:
    """The operands of both operators: what logits are computed from."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    scale: float
    soft_cap: float
    block: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return compute_dtype(self.x.dtype)

    def columns(self) -> list[slice]:
        """The classes of each block."""
        size = self.weight.shape[0]
        return [slice(start, min(start + self.block, size)) for start in range(0, size, self.block)]

    def logits(self, columns: slice, after: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of a block before the soft cap, and `after`: the block waits for that value.

        Otherwise the TPU's scheduler computes several blocks before it reads one.
        """
        x = self.x
        if keeps_barriers() and columns.start:
            x, after = torch.ops.kp.optimization_barrier([x], after)
        # The TPU's compiler folds the upcasts back into the matmul: one pass over the MXU, with a float32 result.
        logits = x.to(self.dtype) @ self.weight[columns].to(self.dtype).t()
        if self.bias is not None:
            logits = logits + self.bias[columns].to(self.dtype)
        return (logits if self.scale == 1 else logits * self.scale), after

    def capped(self, logits: Tensor) -> Tensor:
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def is_target(self, columns: slice) -> Tensor:
        """Where the target of a row is, [N, columns]."""
        return torch.arange(columns.start, columns.stop, device=self.x.device) == self.target[:, None]


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

    def add(self, logits: Tensor, columns: slice, shift: Tensor) -> None:
        weights = self.weights[columns]
        block = ((logits - shift[:, None]) * weights).sum(1)
        self.total = self.total + self.seen * (self.shift - shift) + block
        self.seen, self.shift = self.seen + weights.sum(), shift


def losses(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, statistics, smooth_loss) of the arguments of `kp::linear_cross_entropy`."""
    head = Head(*arguments[:NUM_OPERANDS])
    smooth = _SmoothSum.of(head, *arguments[NUM_OPERANDS:])
    most = head.x.new_full(head.target.shape, -math.inf, dtype=head.dtype)
    total, chosen = torch.zeros_like(most), torch.zeros_like(most)
    for columns in head.columns():
        logits, total = head.logits(columns, after=total)
        logits = head.capped(logits)
        higher = torch.maximum(most, logits.amax(1))
        # Of a row whose logits are -inf so far, nothing is subtracted: -inf less itself is NaN.
        shift = torch.where(higher == -math.inf, 0.0, higher)
        total = total * torch.exp(most - shift) + torch.exp(logits - shift[:, None]).sum(1)
        chosen = chosen + torch.where(head.is_target(columns), logits, 0.0).sum(1)
        if smooth is not None:
            smooth.add(logits, columns, shift)
        most = higher
    # The difference is exact where the target is likely; a sum of the statistics would round away the loss.
    log_total = torch.log(total)
    smooth_loss = most.new_empty(0) if smooth is None else smooth.seen * log_total - smooth.total
    return (most - chosen) + log_total, torch.stack((most, log_total)), smooth_loss


def gradients(grad: Tensor, *arguments: Any, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(d_x, d_weight, d_bias) of the arguments of `kp::linear_cross_entropy_backward`."""
    head, (statistics, *others) = Head(*arguments[:NUM_OPERANDS]), arguments[NUM_OPERANDS:]
    head = replace(head, x=_in_vector_memory(head.x))
    x, result = head.x.to(head.dtype), out_dtype or head.x.dtype
    d_x, d_weight, d_bias = torch.zeros_like(x), [], []
    for columns in head.columns():
        logits, d_x = head.logits(columns, after=d_x)
        d_logits = _d_logits(head, logits, columns, statistics, grad, *others)
        # Rounded as the gradient of the logits is where they are whole.
        rounded = d_logits.to(head.x.dtype).to(head.dtype)
        d_x = d_x + rounded @ head.weight[columns].to(head.dtype)
        d_weight.append((rounded.t() @ x).to(result))
        d_bias.append(d_logits.sum(0))
    return d_x.to(result), torch.cat(d_weight), torch.cat(d_bias).to(result)


def _in_vector_memory(x: Tensor) -> Tensor:
    """`x`; on a TPU the result of an operation, which may be in vector memory.

    A backward starts with this operator, so there is no time to copy an argument there. Reading [2048, 1024] from HBM
    for every block of rows makes the logits of 32,000 classes cost 1.41 instead of 0.94 ms on a v5e.
    """
    return held(x * held(x.new_ones(()))) if keeps_barriers() else x


def _d_logits(
    head: Head,
    logits: Tensor,
    columns: slice,
    statistics: Tensor,
    grad: Tensor,
    smooth_weights: Tensor | None = None,
    smooth_grad: Tensor | None = None,
    lse_grad: Tensor | None = None,
) -> Tensor:
    """The derivative of the losses and the log-sum-exp by a block of the matmul and bias."""
    capped = head.capped(logits)
    softmax = torch.exp((capped - statistics[0, :, None]) - statistics[1, :, None])
    found = (softmax - head.is_target(columns).to(head.dtype)) * grad.to(head.dtype)[:, None]
    if smooth_weights is not None and smooth_grad is not None:
        weights = smooth_weights.to(head.dtype)
        found = found + (weights.sum() * softmax - weights[columns]) * smooth_grad.to(head.dtype)[:, None]
    if lse_grad is not None:
        found = found + softmax * lse_grad.to(head.dtype)[:, None]
    if head.soft_cap:
        found = found * (1 - torch.square(capped / head.soft_cap))
    return found if head.scale == 1 else found * head.scale
