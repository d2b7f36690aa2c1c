"""`kp::attention`, `kp::attention_train` and its backward: attention that passes no S x T tensor between programs.

    attention(q, k, v, masks, fills, batch_dims, scale, is_causal, zero_rows, block) -> result
    attention_train(the same) -> (result, statistics)
    attention_backward(grad, q, k, v, result, statistics, masks, ..., block, q_factor, k_factor) -> (d_q, d_k, d_v)

    q [N, S, D], k [N, D, T], v [N, T, E], result and grad [N, S, E], statistics [2, N, S]; N = B x H

`attention_forms.py` implements them and documents the arguments. A pass inserts them into graphs after autograd, so the
operators need no derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops import attention_forms as forms
from kp_dynamo.ops.attention_forms import Saved, Scoring
from kp_dynamo.ops.compute_dtype import compute_dtype

_library = torch.library.Library("kp", "FRAGMENT")
_SCORING = "Tensor[] masks, float[] fills, SymInt[] batch_dims, float scale, bool is_causal, bool zero_rows, int block"
_OPERANDS = f"(Tensor q, Tensor k, Tensor v, {_SCORING})"
_library.define(f"attention{_OPERANDS} -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(f"attention_train{_OPERANDS} -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    f"attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor result, Tensor statistics, {_SCORING}, "
    "float q_factor, float k_factor) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _attention(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> Tensor:
    return forms.attention(q, k, v, _checked((q, k, v), scoring))


def _attention_train(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> tuple[Tensor, Tensor]:
    return forms.attention_train(q, k, v, _checked((q, k, v), scoring))


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, statistics: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *scoring, q_factor, k_factor = rest
    saved = Saved(q, k, v, result, statistics)
    return forms.attention_backward(grad, saved, _checked((q, k, v, grad, result), scoring), (q_factor, k_factor))


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> Tensor:
    _checked((q, k, v), scoring)
    return v.new_empty((*q.shape[:2], v.shape[2]))


def _attention_train_fake(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> tuple[Tensor, Tensor]:
    result = _attention_fake(q, k, v, *scoring)
    return result, q.new_empty((2, *q.shape[:2]), dtype=compute_dtype(q.dtype))


def _attention_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, statistics: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _checked((q, k, v, grad, result), rest[:-2])
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _checked(operands: Sequence[Tensor], arguments: Sequence[Any]) -> Scoring:
    """The arguments after the operands by name; raises for invalid ones. Sizes may be symbols: matmuls check them."""
    dtypes = {x.dtype for x in operands}
    if len(dtypes) != 1 or not operands[0].dtype.is_floating_point:
        names = ", ".join(str(x.dtype) for x in operands)
        raise TypeError(f"kp::attention: operands {names} must have the same floating-point dtype")
    if any(x.dim() != 3 for x in operands):
        raise ValueError(f"kp::attention: operands have {[x.dim() for x in operands]} dimensions, must have 3 each")
    scoring = Scoring(*arguments)
    if len(scoring.masks) != len(scoring.fills):
        raise ValueError(f"kp::attention: {len(scoring.masks)} masks need as many fills, got {len(scoring.fills)}")
    if scoring.block < 1:
        raise ValueError(f"kp::attention: block={scoring.block} is invalid: it must be at least 1")
    return scoring


# torch_xla 2.9 lowers views to views during functionalization, but to gathers of elements below it. So the operators
# are decomposed at the Functionalize key.
for _device in ("CPU", "Functionalize"):
    _library.impl("attention", _attention, _device)
    _library.impl("attention_train", _attention_train, _device)
    _library.impl("attention_backward", _attention_backward, _device)
torch.library.register_fake("kp::attention", _attention_fake, lib=_library)
torch.library.register_fake("kp::attention_train", _attention_train_fake, lib=_library)
torch.library.register_fake("kp::attention_backward", _attention_backward_fake, lib=_library)


@register_flop_formula([torch.ops.kp.attention, torch.ops.kp.attention_train])
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """For `torch.utils.flop_counter`: two full matmuls, whatever the mask skips."""
    return 2 * q[0] * q[1] * k[2] * (q[2] + v[2])


@register_flop_formula(torch.ops.kp.attention_backward)
def _backward_flops(_: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *__: Any, **___: Any) -> int:
    """The four matmuls of the gradients. The recomputed scores are not model FLOPs."""
    return 2 * _flops(q, k, v)
