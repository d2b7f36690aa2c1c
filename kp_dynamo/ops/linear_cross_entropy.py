"""`kp::linear_cross_entropy` and its backward: a Linear layer and the cross entropy of its logits, never whole.

    linear_cross_entropy(x, weight, bias, target, scale, soft_cap, block, smooth_weights=None, *, keep=False,
                         parts=1)
        -> (loss, statistics, smooth_loss, exponentials)
    linear_cross_entropy_backward(grad, x, weight, bias, target, scale, soft_cap, block, statistics,
                                  smooth_weights=None, smooth_grad=None, lse_grad=None,
                                  exponentials=None, loss=None, *, out_dtype=None, parts=1)
        -> (d_x, d_weight, d_bias)

    x [N, K], weight [V, K], bias [V] or None, target [N] of 0 to V - 1, smooth_weights [V] or None; loss, smooth_loss,
    grad, smooth_grad and lse_grad [N]; statistics [2, N], the maximum of a row's logits and the logarithm of the sum of
    their exponentials after it is subtracted

`loss` is the negative log probability of each row's target under the softmax of its logits, and has no reduction. The
logits are scale * (x @ weight.T + bias), or soft_cap * tanh(that / soft_cap) unless soft_cap is 0 (Gemma 2).
`smooth_loss` is the negative sum of smooth_weights times the log probabilities of all classes, the second loss of label
smoothing (Szegedy et al., arXiv:1512.00567); without weights it has the size 0. At most `block` columns of the logits
exist at a time, in float32 (float64 for float64 operands); the backward computes them again. The running maximum and
sum are those of Milakov and Gimelshein, arXiv:1805.02867; the gradient of a row is grad * (softmax - one_hot(target)) +
smooth_grad * (sum(smooth_weights) * softmax - smooth_weights) + lse_grad * softmax.

With `keep` and bfloat16 operands, the logits are one block, and the forward also returns `exponentials` [N, V] in
bfloat16, those of the logits less their maximum. The backward then reads them and `loss` instead of computing the
logits again. An exponential is rounded relative to its size, as any bfloat16 number; a rounded logit would change it by
up to 3%. Otherwise `exponentials` has the size 0. A soft cap allows no `keep`: its derivative needs the logits.

If several chips divide the classes into equal `parts`, a block has the same classes of each: then each chip computes
with its own part of the weight, and only sums of rows travel.

The sum of the two statistics is the log-sum-exp of a row, which a z-loss squares (Chowdhery et al., arXiv:2204.02311).
`lse_grad` is its gradient.

A pass inserts the operators into graphs after autograd, so they need no derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops.logit_blocks import NUM_OPERANDS, Head, keeps, losses
from kp_dynamo.ops.logit_gradients import gradients

_library = torch.library.Library("kp", "FRAGMENT")
_HEAD = "Tensor x, Tensor weight, Tensor? bias, Tensor target, float scale, float soft_cap, int block"
_library.define(
    f"linear_cross_entropy({_HEAD}, Tensor? smooth_weights=None, *, bool keep=False, int parts=1) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    f"linear_cross_entropy_backward(Tensor grad, {_HEAD}, Tensor statistics, Tensor? smooth_weights=None, "
    "Tensor? smooth_grad=None, Tensor? lse_grad=None, Tensor? exponentials=None, Tensor? loss=None, *, "
    "ScalarType? out_dtype=None, int parts=1) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _forward_fake(*arguments: Any, keep: bool = False, parts: int = 1) -> tuple[Tensor, ...]:
    smooth = arguments[NUM_OPERANDS:]
    head = _checked(arguments[:NUM_OPERANDS], *smooth, parts=parts)
    if keep and head.soft_cap:
        raise ValueError(f"kp::linear_cross_entropy: keep=True with soft_cap={head.soft_cap}, must be 0")
    rows = head.target.shape
    is_smooth = bool(smooth) and smooth[0] is not None
    shapes = rows, (2, *rows), rows if is_smooth else (0,)
    kept = (*rows, head.weight.shape[0]) if keeps(head.x, keep) else (0,)
    results = [head.x.new_empty(shape, dtype=head.dtype) for shape in shapes]
    return (*results, head.x.new_empty(kept, dtype=torch.bfloat16))


def _backward_fake(
    _: Tensor, *arguments: Any, out_dtype: torch.dtype | None = None, parts: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    head = _checked(arguments[:NUM_OPERANDS], *arguments[NUM_OPERANDS + 1 : NUM_OPERANDS + 2], parts=parts)
    shapes = head.x.shape, head.weight.shape, head.weight.shape[:1]
    return tuple(head.x.new_empty(shape, dtype=out_dtype or head.x.dtype) for shape in shapes)  # type: ignore[return-value]


def _checked(operands: Sequence[Any], smooth_weights: Tensor | None = None, *, parts: int = 1) -> Head:
    """The operands by name; raises for invalid ones. Sizes may be symbols: matmuls check them."""
    head = replace(Head(*operands), parts=parts)
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
    if smooth_weights is not None and smooth_weights.shape != weight.shape[:1]:
        raise ValueError(
            f"kp::linear_cross_entropy: smooth_weights has the shape {list(smooth_weights.shape)}, must have one "
            f"number for each of the {weight.shape[0]} classes"
        )
    if parts < 1 or (parts > 1 and weight.shape[0] % parts):
        raise ValueError(
            f"kp::linear_cross_entropy: parts={parts} is invalid for {weight.shape[0]} classes: it must divide them"
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
    _library.impl("linear_cross_entropy", losses, _device)
    _library.impl("linear_cross_entropy_backward", gradients, _device)
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
