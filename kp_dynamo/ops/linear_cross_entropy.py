"""`kp::linear_cross_entropy` and its backward: a Linear layer and the cross entropy of its logits, never whole.

    linear_cross_entropy(x, weight, bias, target, scale, soft_cap, block) -> (loss, statistics)
    linear_cross_entropy_backward(grad, x, weight, bias, target, scale, soft_cap, block, statistics, *, out_dtype)
        -> (d_x, d_weight, d_bias)

    x [N, K], weight [V, K], bias [V] or None, target [N] of 0 to V - 1; loss and grad [N]; statistics [2, N], the
    maximum of a row's logits and the logarithm of the sum of their exponentials after it is subtracted

`loss` is the negative log probability of each row's target under the softmax of its logits, and has no reduction. The
logits are scale * (x @ weight.T + bias), or soft_cap * tanh(that / soft_cap) unless soft_cap is 0 (Gemma 2).
At most `block` columns of the logits exist at a time, in float32 (float64 for float64 operands); the backward computes
them again. The running maximum and sum are those of Milakov and Gimelshein, arXiv:1805.02867; the gradient of a row is
grad * (softmax - one_hot(target)).

A pass inserts the operators into graphs after autograd, so they need no derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.optimization_barrier import keeps_barriers

_library = torch.library.Library("kp", "FRAGMENT")
_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor target, float scale, float soft_cap, int block"
_library.define(f"linear_cross_entropy({_HEAD}) -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    f"linear_cross_entropy_backward(Tensor grad, {_HEAD}, Tensor statistics, *, ScalarType? out_dtype=None) "
    "-> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


@dataclass(frozen=True)
class Head:
    """The arguments of both operators: what logits are computed from."""

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


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    head = Head(*arguments)
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
        most = higher
    # The difference is exact where the target is likely; a sum of the statistics would round away the loss.
    log_total = torch.log(total)
    return (most - chosen) + log_total, torch.stack((most, log_total))


def _backward(grad: Tensor, *arguments: Any, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    *operands, statistics = arguments
    head = Head(*operands)
    x, result = head.x.to(head.dtype), out_dtype or head.x.dtype
    d_x, d_weight, d_bias = torch.zeros_like(x), [], []
    for columns in head.columns():
        logits, d_x = head.logits(columns, after=d_x)
        d_logits = _d_logits(head, logits, statistics, head.is_target(columns)) * grad.to(head.dtype)[:, None]
        # Rounded as the gradient of the logits is where they are whole.
        rounded = d_logits.to(head.x.dtype).to(head.dtype)
        d_x = d_x + rounded @ head.weight[columns].to(head.dtype)
        d_weight.append((rounded.t() @ x).to(result))
        d_bias.append(d_logits.sum(0))
    return d_x.to(result), torch.cat(d_weight), torch.cat(d_bias).to(result)


def _d_logits(head: Head, logits: Tensor, statistics: Tensor, is_target: Tensor) -> Tensor:
    """The derivative of a row's loss by its matmul and bias."""
    capped = head.capped(logits)
    softmax = torch.exp((capped - statistics[0, :, None]) - statistics[1, :, None])
    found = softmax - is_target.to(head.dtype)
    if head.soft_cap:
        found = found * (1 - torch.square(capped / head.soft_cap))
    return found if head.scale == 1 else found * head.scale


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    head = _checked(arguments)
    rows = head.target.shape
    return head.x.new_empty(rows, dtype=head.dtype), head.x.new_empty((2, *rows), dtype=head.dtype)


def _backward_fake(_: Tensor, *arguments: Any, out_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    head = _checked(arguments[:-1])
    shapes = head.x.shape, head.weight.shape, head.weight.shape[:1]
    return tuple(head.x.new_empty(shape, dtype=out_dtype or head.x.dtype) for shape in shapes)  # type: ignore[return-value]


def _checked(arguments: Sequence[Any]) -> Head:
    """The arguments by name; raises for invalid ones. Sizes may be symbols: matmuls check them."""
    head = Head(*arguments)
    x, weight, target = head.x, head.weight, head.target
    if x.dtype != weight.dtype or not x.dtype.is_floating_point:
        raise TypeError(
            f"kp::linear_cross_entropy: operands {x.dtype} and {weight.dtype} must have the same floating-point dtype"
        )
    if (x.dim(), weight.dim(), target.dim()) != (2, 2, 1):
        raise ValueError(
            f"kp::linear_cross_entropy: x, weight and target have {x.dim()}, {weight.dim()} and {target.dim()} "
            "dimensions, must have 2, 2 and 1"
        )
    if head.block < 1 or head.soft_cap < 0:
        raise ValueError(
            f"kp::linear_cross_entropy: block={head.block}, soft_cap={head.soft_cap} are invalid: a block has at least "
            "1 column, and a soft cap is positive, or 0 for none"
        )
    return head


# torch_xla 2.9 lowers views to views during functionalization, but to gathers of elements below it. So the operators
# are decomposed at the Functionalize key.
for _device in ("CPU", "Functionalize"):
    _library.impl("linear_cross_entropy", _forward, _device)
    _library.impl("linear_cross_entropy_backward", _backward, _device)
torch.library.register_fake("kp::linear_cross_entropy", _forward_fake, lib=_library)
torch.library.register_fake("kp::linear_cross_entropy_backward", _backward_fake, lib=_library)


@register_flop_formula(torch.ops.kp.linear_cross_entropy)
def _flops(x: torch.Size, weight: torch.Size, *_: object, **__: object) -> int:
    """For `torch.utils.flop_counter`: the logits."""
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.kp.linear_cross_entropy_backward)
def _backward_flops(_: torch.Size, x: torch.Size, weight: torch.Size, *__: object, **___: object) -> int:
    """The two matmuls of the gradients. The recomputed logits are not model FLOPs."""
    return 2 * _flops(x, weight)
