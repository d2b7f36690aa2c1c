"""Floating-point reductions that torch_xla 2.9 gets wrong for infinities or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import converted
from kp_dynamo.lowering.hidden_constants import divided, mean
from kp_dynamo.lowering.hlo_ops import reduce_max, reduce_min
from kp_dynamo.lowering.spmd import is_spmd

aten = torch.ops.aten

Reduce = Callable[[torch.Tensor, list[int]], torch.Tensor]


def _extreme(reduce: Reduce, op: Any) -> Callable[..., Any]:
    """`amax` or `amin`: torch_xla starts from the lowest finite number, which it returns for rows of -inf."""

    def form(x: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        if not _has_extremes(x):
            return op(x, dim, keepdim)
        return _over(reduce, x, _dims(x, dim), keepdim)

    return form


def _extreme_of_all(reduce: Reduce, op: Any) -> Callable[..., Any]:
    return lambda x: _over(reduce, x, _dims(x, ()), False) if _has_extremes(x) else op(x)


def _aminmax(x: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = () if dim is None else (dim,)
    return _AMIN(x, dims, keepdim), _AMAX(x, dims, keepdim)


def _vector_norm(
    x: torch.Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """torch_xla raises to the power -inf, starts from the lowest finite number, and counts modulo 256."""
    if order == 0 and x.dim() and x.is_floating_point():
        is_counted = x if dtype is None else x.to(dtype)
        return (is_counted != 0).to(is_counted.dtype).sum(_dims(x, dim or ()), keepdim)
    if order not in (math.inf, -math.inf) or x.numel() == 0:
        return aten.linalg_vector_norm.default(x, order, dim, keepdim, dtype=dtype)
    extreme = _AMAX if order > 0 else _AMIN
    return extreme(x.abs() if dtype is None else x.to(dtype).abs(), dim or (), keepdim)


def _over(reduce: Reduce, x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
    result = reduce(x, dims)
    if is_spmd():  # XLA:CPU drops a NaN in a maximum across devices, but adds up a count of NaNs correctly
        result = torch.where(x.isnan().to(torch.int32).sum(dims) > 0, math.nan, result)
    return result.reshape(shape) if keepdim else result


def _has_extremes(x: torch.Tensor) -> bool:
    """Whether there are elements to reduce that may be infinite."""
    return x.dtype.is_floating_point and x.dim() > 0 and x.numel() > 0


def _dims(x: torch.Tensor, dim: Sequence[int]) -> list[int]:
    return sorted(d % x.dim() for d in dim) if dim else list(range(x.dim()))


_AMAX = _extreme(reduce_max, aten.amax.default)
_AMIN = _extreme(reduce_min, aten.amin.default)


def _of_booleans(op: Any) -> Callable[..., Any]:
    """XLA cannot partition torch_xla's reduction of numbers across devices, but can partition that of booleans."""

    def form(x: torch.Tensor, *args: Any) -> Any:
        if x.dtype == torch.bool:
            return op(x, *args)
        result = op(x != 0, *args)
        return result.to(torch.uint8) if x.dtype == torch.uint8 else result

    return form


def _mean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    x = x if dtype is None else converted(x, dtype)
    if not x.is_floating_point():
        return aten.mean.dim(x, dim, keepdim)
    return mean(x, _dims(x, dim or ()), keepdim) if x.dim() else x.clone()


def _variance(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    """The mean of squared deviations, and the mean, in the shape of the result; for at least one element."""
    dims = _dims(x, dim or ()) if x.dim() else []
    average = mean(x, dims, keepdim=True)
    count = math.prod(x.shape[d] for d in dims) - (1 if correction is None else correction)
    squares = (x - average).square()
    variance = divided(squares.sum(dims, keepdim) if dims else squares, max(count, 0))
    return variance, average if keepdim else average.reshape(variance.shape)


def _spread(op: Any, finish: Callable[..., Any]) -> Callable[..., Any]:
    """The spread of equal numbers is 0: torch_xla's mean of them is a different number (`hidden_constants`)."""

    def form(x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
        if not x.is_floating_point() or not x.numel():
            return op(x, dim, correction=correction, keepdim=keepdim)
        return finish(*_variance(x, dim, correction=correction, keepdim=keepdim))

    return form


REDUCTION_FORMS: dict[Any, Callable[..., Any]] = {
    aten.amax.default: _AMAX,
    aten.amin.default: _AMIN,
    aten.max.default: _extreme_of_all(reduce_max, aten.max.default),
    aten.min.default: _extreme_of_all(reduce_min, aten.min.default),
    aten.aminmax.default: _aminmax,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var.correction: _spread(aten.var.correction, lambda variance, _: variance),
    aten.std.correction: _spread(aten.std.correction, lambda variance, _: variance.sqrt()),
    aten.var_mean.correction: _spread(aten.var_mean.correction, lambda variance, mean: (variance, mean)),
    aten.std_mean.correction: _spread(aten.std_mean.correction, lambda variance, mean: (variance.sqrt(), mean)),
    aten.linalg_vector_norm.default: _vector_norm,
    **{
        op: _of_booleans(op)
        for op in (
            aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims,
        )
    },
}  # fmt: skip
