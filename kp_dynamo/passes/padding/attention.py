"""`kp::attention` and its gradients: one more mask hides the keys in the tail, and tails are filled, so never NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from kp_dynamo.ops.attention_args import AttentionArgs
from kp_dynamo.passes.padding.atoms import (
    Atoms,
    Padded,
    Refused,
    Size,
    equal_sizes,
    expression,
    has_tail,
    is_prefix,
    plain,
    same,
)
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.layout import aligned
from kp_dynamo.passes.padding.rules import rule

kp = torch.ops.kp

_OPERANDS = {"q": "nsd", "k": "mdt", "v": "mte"}  # several of N heads may share one of M


@rule(kp.attention.default, kp.attention_train.default, layouts=_OPERANDS)
def _attention(call: Call) -> Any:
    """Queries in the tail give result rows in the tail. Tails are filled with 0: a weight of 0 times a NaN is NaN."""
    args = AttentionArgs.of(call)
    q, k, v = args.operands
    scoring = _padded_scoring(call, args)
    fill, last = call.masks.filled, replace(args, scoring=scoring).last
    result = call.run(fill(q, [2], 0), fill(k, [1], 0), fill(v, [1], 0), *scoring.in_order, *last)
    dims = (*q.dims[:2], v.dims[2])
    if call.target is kp.attention.default:
        return Padded(result, dims)
    return Padded(result[0], dims), Padded(result[1], ((2,), *q.dims[:2]))


@rule(
    kp.attention_backward.default,
    kp.attention_backward.bias,
    kp.attention_backward.sinks,
    layouts={**_OPERANDS, "grad": "nse", "result": "nse", "statistics": "zns"},
)
def _attention_backward(call: Call) -> tuple[Padded, ...]:
    """Gradients of keys and values sum over queries, and that of queries over keys, so every tail is cleared."""
    args = AttentionArgs.of(call)
    scoring = _padded_scoring(call, args)
    *cleared, statistics = args.operands
    # The statistics get 1, to divide by. Tails of masks would reach the weights.
    operands = *map(call.masks.cleared, cleared), call.masks.cleared(statistics, 1)
    scoring = replace(scoring, masks=[call.masks.cleared(m) for m in scoring.masks])
    results = call.run(*operands, *scoring.in_order, *replace(args, scoring=scoring).last)
    dims = [x.dims for x in (args.q, args.k, args.v)]
    if call.target is kp.attention_backward.bias:
        heads = plain(scoring.batch_dims)[1]
        dims.append((heads, args.q.dims[1], args.k.dims[2]))
    if call.target is kp.attention_backward.sinks:
        dims.append(args.q.dims[:2])
    return tuple(Padded(result, of) for result, of in zip(results, dims, strict=True))


def _padded_scoring(call: Call, args: AttentionArgs) -> Any:
    """The scoring of a call, with one more mask if the keys have a tail; its masks are padded tensors."""
    scoring, queries, keys = args.scoring, args.q.dims[1], args.k.dims[2]
    _check_heads(args.q.dims[0], args.k.dims[0])
    masks: Any = scoring.masks
    batch_dims = plain(scoring.batch_dims)
    has_dims = masks or scoring.sinks is not None
    if has_dims and not same(args.q.dims[0], tuple(a for atoms in batch_dims for a in atoms)):
        raise Refused("the attention heads and masks have different layouts")
    masks = [aligned(call.masks, m, (*batch_dims, queries, keys)) for m in masks]
    sinks: Any = scoring.sinks
    if sinks is not None:
        sinks = call.masks.cleared(aligned(call.masks, sinks, (*batch_dims, queries, ())))
    scoring = replace(scoring, sinks=sinks)
    if not has_tail(keys):
        return replace(scoring, masks=masks)
    zero_rows = scoring.zero_rows or _is_zero_without_keys(keys, is_masked=bool(masks))
    masks.append(Padded(call.masks.is_true(keys).view([1, -1]), ((), keys)))
    return replace(scoring, masks=masks, fills=[*scoring.fills, -math.inf], zero_rows=zero_rows)


def _check_heads(heads: Atoms, shared: Atoms) -> None:
    """Refuse heads of which some are in a tail, unless they lie as the keys that they read."""
    if same(heads, shared) or not (has_tail(heads) or has_tail(shared)):
        return
    if not (is_prefix(heads) and is_prefix(shared) and equal_sizes(heads[0], shared[0])):
        raise Refused("the heads of queries and those of keys that they share have different layouts")


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
