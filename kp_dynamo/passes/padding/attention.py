"""`kp::attention` and its gradients: one more mask hides the keys in the tail, and tails are filled, so never NaN."""

from __future__ import annotations

import math
from typing import Any

import torch

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.passes.padding.atoms import Atoms, Padded, Refused, Size, expression, has_tail, plain, same
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.layout import aligned
from kp_dynamo.passes.padding.rules import rule

kp = torch.ops.kp


_OPERANDS = {"q": "nsd", "k": "ndt", "v": "nte"}


@rule(kp.attention.default, kp.attention_train.default, layouts=_OPERANDS)
def _attention(call: Call) -> Any:
    """Queries in the tail give result rows in the tail. Tails are filled with 0: a weight of 0 times a NaN is NaN."""
    q, k, v = call.args[:3]
    masks, *rest = _scoring(call, 3, q, k)
    fill = call.masks.filled
    operands = fill(q, [2], 0), fill(k, [1], 0), fill(v, [1], 0)
    result = call.run(*operands, [m.tensor for m in masks], *rest)
    dims = (*q.dims[:2], v.dims[2])
    if call.target is kp.attention.default:
        return Padded(result, dims)
    return Padded(result[0], dims), Padded(result[1], ((2,), *q.dims[:2]))


@rule(kp.attention_backward.default, layouts={**_OPERANDS, "grad": "nse", "result": "nse", "statistics": "zns"})
def _attention_backward(call: Call) -> tuple[Padded, ...]:
    """Gradients of keys and values sum over queries, and that of queries over keys, so every tail is cleared."""
    grad, q, k, v, result, statistics = call.args[:6]
    masks, *rest = _scoring(call, 6, q, k)
    cleared = [call.masks.cleared(x) for x in (grad, q, k, v, result)]
    # The statistics get 1, to divide by. Tails of masks would reach the weights.
    operands = *cleared, call.masks.cleared(statistics, 1), [call.masks.cleared(m) for m in masks]
    results = call.run(*operands, *rest)
    return tuple(Padded(r, x.dims) for r, x in zip(results, (q, k, v), strict=True))


def _scoring(call: Call, first: int, q: Padded, k: Padded) -> list[Any]:
    """The arguments from the masks on, with one more mask if the keys have a tail."""
    masks, fills, batch_dims, scale, is_causal, zero_rows, *rest = call.args[first:]
    queries, keys = q.dims[1], k.dims[2]
    if masks and not same(q.dims[0], tuple(a for atoms in plain(batch_dims) for a in atoms)):
        raise Refused("the attention heads and masks have different layouts")
    masks = [aligned(call.masks, m, (*plain(batch_dims), queries, keys)) for m in masks]
    if has_tail(keys):
        zero_rows = zero_rows or _is_zero_without_keys(keys, is_masked=bool(masks))
        masks.append(Padded(call.masks.is_true(keys).view([1, -1]), ((), keys)))
        fills = [*fills, -math.inf]
    return [masks, fills, batch_dims, scale, is_causal, zero_rows, *rest]


def _is_zero_without_keys(keys: Atoms, *, is_masked: bool) -> bool:
    """Whether rows without keys must be zeroed: only if the true number of keys may be 0."""
    if all(map(_is_never_zero, keys)):
        return False
    if is_masked:
        raise Refused("the number of keys may be 0, and a mask may hide all keys of a row")
    return True


def _is_never_zero(size: Size) -> bool:
    if not isinstance(size, torch.SymInt):
        return size > 0
    return bool(size.node.shape_env.bound_sympy(expression(size)).lower > 0)
