"""Reductions, softmax and cumulative sums: the tail is filled with the identity of the reduction."""

from __future__ import annotations

import math
from typing import Any

import torch

from kp_dynamo.passes.padding.atoms import Atoms, Dims, Padded, is_prefix
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.layout import true_number, with_one_atom
from kp_dynamo.passes.padding.masks import Number
from kp_dynamo.passes.padding.rules import aten, rule

_IDENTITIES: dict[Any, float] = {
    aten.sum.default: 0, aten.sum.dim_IntList: 0, aten.prod.default: 1, aten.prod.dim_int: 1,
    aten.amax.default: -math.inf, aten.amin.default: math.inf, aten.max.default: -math.inf, aten.min.default: math.inf,
    aten.any.default: 0, aten.any.dim: 0, aten.any.dims: 0, aten.all.default: 1, aten.all.dim: 1, aten.all.dims: 1,
    aten.logsumexp.default: -math.inf,
}  # fmt: skip


def _reduced(call: Call, position: int = 1) -> list[int]:
    """The dimensions that a reduction runs over."""
    rank = len(call.args[0].dims)
    dims = call.named_arg("dim", position)
    chosen = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return sorted({d % rank for d in chosen}) if rank else []


def _remaining(call: Call, dims: list[int], keeps: bool) -> Dims:
    kept = enumerate(call.args[0].dims)
    return tuple(() if d in dims else atoms for d, atoms in kept if keeps or d not in dims)


def _keeps(call: Call, position: int) -> bool:
    return bool(call.named_arg("keepdim", position, False))


@rule(*_IDENTITIES, layouts="...")
def _reduce(call: Call) -> Padded:
    has_dims = call.target._overloadname != "default" or call.target in _WITH_DIMS
    dims = _reduced(call) if has_dims else list(range(len(call.args[0].dims)))
    filled = call.masks.filled(call.args[0], dims, _IDENTITIES[call.target])
    return Padded(call.run(filled, *call.args[1:], **call.kwargs), _remaining(call, dims, has_dims and _keeps(call, 2)))


_WITH_DIMS = {aten.amax.default, aten.amin.default, aten.logsumexp.default}


@rule(aten.mean.default, aten.mean.dim, layouts="...")
def _mean(call: Call) -> Padded:
    dims = _reduced(call) if call.target is aten.mean.dim else list(range(len(call.args[0].dims)))
    x, keeps = call.args[0], call.target is aten.mean.dim and _keeps(call, 2)
    wide = x.replaced(_wide(x.tensor if call.kwargs.get("dtype") is None else x.tensor.to(call.kwargs["dtype"])))
    mean = _summed(call, wide, dims, keeps) / call.masks.true_count(x, dims)
    return Padded(mean.to(call.like.dtype), _remaining(call, dims, keeps))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the dtype that eager accumulates in."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _summed(call: Call, x: Padded, dims: list[int], keeps: bool) -> torch.Tensor:
    return torch.sum(call.masks.filled(x, dims, 0), dims, keepdim=keeps) if dims else x.tensor


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, layouts="...")
def _var(call: Call) -> Any:
    """Two passes, as in torch: the mean, then the mean square of the differences from it."""
    dims, correction = _reduced(call), call.kwargs.get("correction")
    x, keeps = call.args[0].replaced(_wide(call.args[0].tensor)), bool(call.kwargs.get("keepdim", False))
    count: Any = call.masks.true_count(x, dims)
    mean = _summed(call, x, dims, True) / count
    squares = _summed(call, x.replaced(_squared(x.tensor - mean)), dims, keeps)
    variance = squares / _at_least_zero(count - (1 if correction is None else correction))
    left = _remaining(call, dims, keeps)
    if call.target is aten.var_mean.correction:
        small = mean if keeps else mean.reshape([s for d, s in enumerate(mean.shape) if d not in dims])
        return Padded(variance.to(call.like[0].dtype), left), Padded(small.to(call.like[1].dtype), left)
    result = variance.sqrt() if call.target is aten.std.correction else variance
    return Padded(result.to(call.like.dtype), left)


def _squared(x: torch.Tensor) -> torch.Tensor:
    """|x|^2: real numbers, also of complex ones."""
    return x.real**2 + x.imag**2 if x.is_complex() else x**2


def _at_least_zero(count: Number) -> Number:
    return count.clamp(min=0) if isinstance(count, torch.Tensor) else max(0, count)


@rule(aten.linalg_vector_norm.default, layouts="...")
def _vector_norm(call: Call) -> Padded:
    order, dims = call.arg(1, 2), _reduced(call, 2)
    filled = call.masks.filled(call.args[0], dims, math.inf if order < 0 else 0)
    return Padded(call.run(filled, *call.args[1:], **call.kwargs), _remaining(call, dims, _keeps(call, 3)))


_EXTREMES = {
    aten.argmax.default: -math.inf, aten.argmin.default: math.inf,
    aten.max.dim: -math.inf, aten.min.dim: math.inf,
}  # fmt: skip


@rule(*_EXTREMES, layouts="...")
def _extreme(call: Call) -> Any:
    """The index of the extreme: the first of equal values, and no tail precedes it."""
    x, keeps = call.args[0], _keeps(call, 2)
    dims = _reduced(call)
    is_flat = call.named_arg("dim", 1) is None
    merged = tuple(atom for d in dims for atom in x.dims[d]) if is_flat else x.dims[dims[0]] if dims else ()
    result = call.run(call.masks.filled(x, dims, _EXTREMES[call.target]), *call.args[1:], **call.kwargs)
    left = _remaining(call, dims, keeps)
    if isinstance(result, tuple):
        return Padded(result[0], left), Padded(_true_place(call, result[1], merged), left)
    return Padded(_true_place(call, result, merged), left)


def _true_place(call: Call, place: torch.Tensor, atoms: Atoms) -> torch.Tensor:
    return place if is_prefix(atoms) else true_number(call.masks, place, atoms)


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default, layouts="...")
def _softmax(call: Call) -> Any:
    x, d = call.args[:2]
    return x.replaced(call.run(call.masks.filled(x, [d], -math.inf), *call.args[1:], **call.kwargs))


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, layouts="...")
def _softmax_backward(call: Call) -> Any:
    gradient, result, d = call.args[:3]
    fill = call.masks.filled
    return result.replaced(call.run(fill(gradient, [d], 0), fill(result, [d], 0), *call.args[2:]))


@rule(
    aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
    layouts="...",
)  # fmt: skip
def _running(call: Call) -> Any:
    """Each element depends only on earlier ones, and the tail is last, so true elements never see it."""
    x, d = call.args[:2]
    x = with_one_atom(call.masks, x, d % len(x.dims)) if x.dims else x
    result = call.run(x, *call.args[1:], **call.kwargs)
    return tuple(map(x.replaced, result)) if isinstance(result, tuple) else x.replaced(result)
