"""`kp::flash_attention`, its form for training and its backward: `kp::attention` as a TPU kernel.

    flash_attention(q, k, v, scale, is_causal, block) -> result
    flash_attention_train(the same) -> (result, statistics)
    flash_attention_backward(grad, q, k, v, result, statistics, scale, is_causal, block, q_factor, k_factor)
        -> (d_q, d_k, d_v)

    q [N, S, D], k [M, D, T], v [M, T, D], M divides N; result and grad [N, S, D], statistics [2, N, S]; N = B x H

Each has two forms. In a trace for a TPU (`flash_kernels.calling_flash`) it is one or two custom calls. Anywhere else it
is the `kp::attention` of the same name, without masks. A pass inserts them into graphs after autograd, so the operators
need no derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from kp_dynamo.ops import attention as _attention  # noqa: F401  # registers what these are written with
from kp_dynamo.ops.attention_scoring import Scoring
from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.flash_kernels import FlashScoring, current_calls

kp = torch.ops.kp

_library = torch.library.Library("kp", "FRAGMENT")
_SCORING = "float scale, bool is_causal, int block"
_OPERANDS = f"(Tensor q, Tensor k, Tensor v, {_SCORING})"
_library.define(f"flash_attention{_OPERANDS} -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(f"flash_attention_train{_OPERANDS} -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_library.define(
    f"flash_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor result, Tensor statistics, {_SCORING}"
    ", float q_factor, float k_factor) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _reference(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> Tensor:
    return kp.attention.default(q, k, v, *_without_masks(scoring))  # type: ignore[no-any-return]


def _reference_train(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> tuple[Tensor, Tensor]:
    return kp.attention_train.default(q, k, v, *_without_masks(scoring))  # type: ignore[no-any-return]


def _reference_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    saved, scoring, factors = rest[:5], rest[5:8], rest[8:]
    found: tuple[Tensor, Tensor, Tensor] = kp.attention_backward.default(
        grad, *saved, *_without_masks(scoring), *factors
    )
    return found


def _without_masks(arguments: Sequence[Any]) -> tuple[Any, ...]:
    scoring = FlashScoring(*arguments)
    return Scoring([], [], [], scoring.scale, scoring.is_causal, zero_rows=False, block=scoring.block).in_order


def _on_xla(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> Tensor:
    calls = current_calls(q.shape[0])
    if calls is None:
        return _reference(q, k, v, *scoring)
    k, v = _of_each_head(q, k, v)
    return calls.attention(q, k, v, FlashScoring(*scoring))


def _on_xla_train(q: Tensor, k: Tensor, v: Tensor, *scoring: Any) -> tuple[Tensor, Tensor]:
    calls = current_calls(q.shape[0])
    if calls is None:
        return _reference_train(q, k, v, *scoring)
    k, v = _of_each_head(q, k, v)
    return calls.attention_train(q, k, v, FlashScoring(*scoring))


def _on_xla_backward(grad: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    calls = current_calls(grad.shape[0])
    if calls is None:
        return _reference_backward(grad, *rest)
    q, k, v, *forward = rest[:5]
    saved = q, *_of_each_head(q, k, v), *forward
    d_q, *others = calls.attention_backward(grad, saved, FlashScoring(*rest[5:8]), (rest[8], rest[9]))
    d_k, d_v = (_summed(x, like) for x, like in zip(others, (k, v), strict=True))
    return d_q, d_k, d_v


def _of_each_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, once for each head that shares them: the kernels take as many as there are queries."""
    count = q.shape[0] // k.shape[0]
    return (k, v) if count == 1 else (k.repeat_interleave(count, 0), v.repeat_interleave(count, 0))


def _summed(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of keys or values that several heads share, from those of each head."""
    if gradient.shape[0] == like.shape[0]:
        return gradient
    of_heads = gradient.reshape(like.shape[0], -1, *like.shape[1:]).to(compute_dtype(gradient.dtype))
    return of_heads.sum(1).to(gradient.dtype)


_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "flash_attention": (_reference, _on_xla),
    "flash_attention_train": (_reference_train, _on_xla_train),
    "flash_attention_backward": (_reference_backward, _on_xla_backward),
}
for _name, (_plain, _traced) in _FORMS.items():
    _library.impl(_name, _plain, "CPU")
    _library.impl(_name, _traced, "Functionalize")  # where kp::attention is decomposed, see there
    torch.library.register_fake(f"kp::{_name}", _plain, lib=_library)

# The FLOPs are those of kp::attention, with full matmuls. A kernel's own cost estimate leaves out what it skips.
for _flash, _whole in (
    (kp.flash_attention, kp.attention),
    (kp.flash_attention_train, kp.attention_train),
    (kp.flash_attention_backward, kp.attention_backward),
):
    register_flop_formula(_flash, get_raw=True)(flop_registry[_whole])
