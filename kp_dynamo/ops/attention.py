"""`kp::attention`, `kp::attention_train` and its backward: attention that passes no S x T tensor between programs.

    attention(q, k, v, masks, fills, batch_dims, scale, is_causal, zero_rows, block, key, rate, soft_cap, sinks)
        -> result
    attention_train(the same) -> (result, statistics)
    attention_backward(grad, q, k, v, result, statistics, masks, ..., block, q_factor, k_factor, key, rate, soft_cap,
                       sinks) -> (d_q, d_k, d_v)
    attention_backward.bias(the same) -> (d_q, d_k, d_v, d_bias), for a bias [H, S, T] that is one of the masks
    attention_backward.sinks(the same) -> (d_q, d_k, d_v, d_sinks), d_sinks [N, S]

    q [N, S, D], k [M, D, T], v [M, T, E], result and grad [N, S, E], statistics [2, N, S]; N = B x H
    M = N / G: each G neighbouring heads share keys and values (Ainslie et al., arXiv:2305.13245); most often G is 1
    key [4] random numbers for the dropout of the probabilities (`dropout_mask.py`), or None for no dropout
    soft_cap a bound of the scores before the masks, or 0 for none
    sinks [B|1, H|1, S|1, 1] one more score for each row, of a key without a value (Agarwal et al., arXiv:2508.10925)

`attention_forms.py` implements them and documents the arguments. A pass inserts them into graphs after autograd, so the
operators need no derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops import attention_forms as forms
from kp_dynamo.ops.attention_forms import Saved
from kp_dynamo.ops.attention_scoring import NUM_SCORING, Scoring
from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.ops.dropout_mask import KEY_SIZE, Dropout

_library = torch.library.Library("kp", "FRAGMENT")
_SCORING = "Tensor[] masks, float[] fills, SymInt[] batch_dims, float scale, bool is_causal, bool zero_rows, int block"
_OPTIONAL = "Tensor? key=None, float rate=0.0, float soft_cap=0.0, Tensor? sinks=None"
_OPERANDS = f"(Tensor q, Tensor k, Tensor v, {_SCORING}, {_OPTIONAL})"
_library.define(f"attention{_OPERANDS} -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define(f"attention_train{_OPERANDS} -> (Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_BACKWARD = (
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor result, Tensor statistics, {_SCORING}, "
    f"float q_factor, float k_factor, {_OPTIONAL}) -> (Tensor, Tensor, Tensor"
)
_library.define(f"attention_backward{_BACKWARD})", tags=torch.Tag.pt2_compliant_tag)
for _also in ("bias", "sinks"):
    _library.define(f"attention_backward.{_also}{_BACKWARD}, Tensor)", tags=torch.Tag.pt2_compliant_tag)


_ORDERED = 4  # batch_dims of heads in the order of the pass `divide_heads`


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return forms.attention(q, k, v, *_checked((q, k, v), *_split(rest)))


def _attention_train(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return forms.attention_train(q, k, v, *_checked((q, k, v), *_split(rest)))


def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, statistics: Tensor, *rest: Any, also: Any
) -> tuple[Tensor, ...]:
    scoring, (q_factor, k_factor, *optional) = _split(rest)
    saved = Saved(q, k, v, result, statistics)
    checked, drop = _checked((q, k, v, grad, result), scoring, optional)
    if also == "bias" and len(checked.batch_dims) != 2:
        raise ValueError(f"kp::attention_backward.bias: batch_dims={checked.batch_dims} are invalid: must be B and H")
    if also == "sinks" and checked.sinks is None:
        raise ValueError("kp::attention_backward.sinks: sinks=None is invalid: must be a tensor")
    return forms.attention_backward(grad, saved, checked, (q_factor, k_factor), drop, also)


def _dense(backward: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    return lambda *arguments: tuple(result.contiguous() for result in backward(*arguments))


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    _checked((q, k, v), *_split(rest))
    return v.new_empty((*q.shape[:2], v.shape[2]))


def _attention_train_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    result = _attention_fake(q, k, v, *rest)
    return result, q.new_empty((2, *q.shape[:2]), dtype=compute_dtype(q.dtype))


def _attention_backward_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, statistics: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    scoring, (_, _, *optional) = _split(rest)
    _checked((q, k, v, grad, result), scoring, optional)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attention_backward_bias_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, statistics: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    found = _attention_backward_fake(grad, q, k, v, result, statistics, *rest)
    scoring, _ = _split(rest)
    shape = Scoring(*scoring).batch_dims[1], q.shape[1], k.shape[2]
    return *found, q.new_empty(shape, dtype=compute_dtype(q.dtype))


def _attention_backward_sinks_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Tensor, statistics: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    found = _attention_backward_fake(grad, q, k, v, result, statistics, *rest)
    return *found, q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype))


def _split(arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The arguments of the scoring, and those after them; torch leaves out defaults at the end."""
    return arguments[:NUM_SCORING], arguments[NUM_SCORING:]


def _checked(
    operands: Sequence[Tensor], scoring: Sequence[Any], optional: Sequence[Any]
) -> tuple[Scoring, Dropout | None]:
    """The arguments after the operands by name; raises for invalid ones. Sizes may be symbols: matmuls check them."""
    _check_operands(operands)
    by_name = Scoring(*scoring, *optional[2:])
    if len(by_name.masks) != len(by_name.fills):
        raise ValueError(f"kp::attention: {len(by_name.masks)} masks need as many fills, got {len(by_name.fills)}")
    if by_name.block < 1:
        raise ValueError(f"kp::attention: block={by_name.block} is invalid: it must be at least 1")
    if not 0 <= by_name.soft_cap < math.inf:
        raise ValueError(f"kp::attention: soft_cap={by_name.soft_cap} is invalid: it must be positive, or 0 for none")
    if by_name.sinks is not None and (by_name.sinks.dim() < 2 or by_name.sinks.shape[-1] != 1):
        raise ValueError(
            f"kp::attention: sinks of the shape {list(by_name.sinks.shape)} are invalid: must be [B|1, H|1, S|1, 1]"
        )
    return by_name, _checked_dropout(by_name.batch_dims, *optional[:2])


def _check_operands(operands: Sequence[Tensor]) -> None:
    dtypes = {x.dtype for x in operands}
    if len(dtypes) != 1 or not operands[0].dtype.is_floating_point:
        names = ", ".join(str(x.dtype) for x in operands)
        raise TypeError(f"kp::attention: operands {names} must have the same floating-point dtype")
    if any(x.dim() != 3 for x in operands):
        raise ValueError(f"kp::attention: operands have {[x.dim() for x in operands]} dimensions, must have 3 each")
    _check_heads(*(x.shape[0] for x in operands[:3]))


def _check_heads(of_queries: Any, of_keys: Any, of_values: Any) -> None:
    if not all(isinstance(size, int) for size in (of_queries, of_keys, of_values)):
        return
    if of_keys != of_values or of_queries % max(of_keys, 1):
        raise ValueError(
            f"kp::attention: {of_queries} heads of queries, {of_keys} of keys and {of_values} of values are invalid: "
            "keys and values need equally many, and that number must divide the heads of queries"
        )


def _checked_dropout(batch_dims: Sequence[int], key: Tensor | None = None, rate: float = 0.0) -> Dropout | None:
    if key is None:
        if rate:
            raise ValueError(f"kp::attention: rate={rate} needs a key, {KEY_SIZE} random numbers")
        return None
    if key.dtype != torch.float32 or key.shape != (KEY_SIZE,):
        raise ValueError(f"kp::attention: the key is {key.dtype}{list(key.shape)}, must be float32 [{KEY_SIZE}]")
    if not 0 <= rate < 1:
        raise ValueError(f"kp::attention: rate={rate} is invalid: it must be at least 0 and less than 1")
    return Dropout(key, rate, tuple(batch_dims) if len(batch_dims) == _ORDERED else ())


# torch_xla 2.9 lowers views to views during functionalization, but to gathers of elements below it. So the operators
# are decomposed at the Functionalize key.
for _device in ("CPU", "Functionalize"):
    _library.impl("attention", _attention, _device)
    _library.impl("attention_train", _attention_train, _device)
    for _also, _name in (("", ""), ("bias", ".bias"), ("sinks", ".sinks")):
        _backward: Any = partial(_attention_backward, also=_also)
        # XLA's tensors have no strides; a graph that runs on the CPU may view the gradients as the fake ones.
        _library.impl(f"attention_backward{_name}", _dense(_backward) if _device == "CPU" else _backward, _device)
torch.library.register_fake("kp::attention", _attention_fake, lib=_library)
torch.library.register_fake("kp::attention_train", _attention_train_fake, lib=_library)
torch.library.register_fake("kp::attention_backward", _attention_backward_fake, lib=_library)
torch.library.register_fake("kp::attention_backward.bias", _attention_backward_bias_fake, lib=_library)
torch.library.register_fake("kp::attention_backward.sinks", _attention_backward_sinks_fake, lib=_library)


@register_flop_formula([torch.ops.kp.attention, torch.ops.kp.attention_train])
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
    """For `torch.utils.flop_counter`: two full matmuls, whatever the mask skips."""
    return 2 * q[0] * q[1] * k[2] * (q[2] + v[2])


@register_flop_formula(torch.ops.kp.attention_backward)
def _backward_flops(_: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *__: Any, **___: Any) -> int:
    """The four matmuls of the gradients. The recomputed scores are not model FLOPs."""
    return 2 * _flops(q, k, v)
