"""Accumulate sums, products and scans of float16 and bfloat16 numbers in float32, as ATen does.

torch_xla 2.9 lets XLA accumulate in the dtype of the operands. In float16, the mean of 4096 values of 100 is infinite,
because their sum is. In bfloat16, the sum of 80000 values of 0.0125 is 960. Here operands are upcast, and the result is
rounded once. XLA fuses the casts into the reduction.

The gradient of an embedding and `index_put` are unchanged: ATen's kernels also round each step, and a float32 table
makes the training of a bfloat16 BERT 16% slower on a v5e (one block, S 256, D 512: 0.229 modelled ms for 0.197).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.lowering.cast_forms import converted, wide
from kp_dynamo.lowering.hidden_constants import divided

aten = torch.ops.aten

_NARROW = (torch.bfloat16, torch.float16)

Form = Callable[..., Any]


def in_float32(target: Any, form: Form) -> Form:
    """`form`, which replaces `target`, with narrow floats accumulated in float32; `form` itself for other targets."""
    if target in _LOSSES:
        return _loss(form, _LOSSES[target])
    if target in _BY_SUM:
        return _BY_SUM[target](form)
    return _upcast(form) if target in _UPCAST else form


def _upcast(form: Form) -> Form:
    """`form` with operands upcast to float32, and float32 results cast to the operands' or the requested dtype."""

    def upcast_form(*args: Any, **kwargs: Any) -> Any:
        if (dtype := kwargs.get("dtype")) is not None:
            args = (converted(args[0], dtype), *args[1:])
        narrow = _narrow_dtype((args, kwargs))
        if narrow is None:
            return form(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(torch.Tensor, wide, (args, kwargs))
        kwargs = kwargs if dtype is None else {**kwargs, "dtype": torch.float32}
        return _rounded(form(*args, **kwargs), narrow)

    return upcast_form


def _narrow_dtype(tree: Any) -> torch.dtype | None:
    """bfloat16 or float16 if all floating-point operands have this dtype."""
    dtypes = {t.dtype for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= set(_NARROW) else None


def _rounded(result: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.dtype == torch.float32 else t, result)


def _loss(form: Form, position: int) -> Form:
    """A loss with elements in its dtype, as in ATen, and a float32 sum: in float16, a square from 65520 on is inf."""

    def loss_form(*args: Any, **kwargs: Any) -> Any:
        is_positional = len(args) > position
        reduction = args[position] if is_positional else kwargs.get("reduction", 1)
        if reduction == 0 or _narrow_dtype((args, kwargs)) is None:
            return form(*args, **kwargs)
        if is_positional:
            loss = form(*args[:position], 0, *args[position + 1 :], **kwargs)
        else:
            loss = form(*args, **{**kwargs, "reduction": 0})
        loss_sum = wide(loss).sum()
        return (divided(loss_sum, loss.numel()) if reduction == 1 else loss_sum).to(loss.dtype)

    return loss_form


def _softmax(form: Form) -> Form:
    """`half_to_float` requests a float32 result."""

    def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> Any:
        return form(wide(x), dim, False).to(torch.float32 if half_to_float else x.dtype)

    return softmax


def _softmax_backward(form: Form) -> Form:
    def backward(gradient: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype) -> Any:
        if gradient.dtype not in _NARROW:
            return form(gradient, output, dim, dtype)
        return form(wide(gradient), wide(output), dim, torch.float32).to(dtype)

    return backward


def _convolution_backward(form: Form) -> Form:
    """The gradient of the bias, [C] from [N, C, ...], is a sum; the gradients of the operands are contractions."""

    def backward(gradient: torch.Tensor, *args: Any) -> Any:
        *others, wanted = args
        if gradient.dtype not in _NARROW or not wanted[2]:
            return form(gradient, *args)
        dims = [0, *range(2, gradient.dim())]
        of_bias = gradient.float().sum(dims).to(gradient.dtype)
        if not any(wanted[:2]):
            return None, None, of_bias
        of_x, of_weight, _ = form(gradient, *others, [*wanted[:2], False])
        return of_x, of_weight, of_bias

    return backward


def _scatter_reduce(form: Form) -> Form:
    """Sums and products. An extreme is one of the operands, and needs no upcast."""
    upcast_form = _upcast(form)

    def scatter_reduce(x: torch.Tensor, dim: int, index: Any, source: torch.Tensor, reduce: str, **kwargs: Any) -> Any:
        chosen = form if reduce in ("amax", "amin") else upcast_form
        return chosen(x, dim, index, source, reduce, **kwargs)

    return scatter_reduce


_BY_SUM: dict[Any, Callable[[Form], Form]] = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.convolution_backward.default: _convolution_backward,
    aten.scatter_reduce.two: _scatter_reduce,
}
# Position of the argument `reduction`.
_LOSSES = {
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.binary_cross_entropy_with_logits.default: 4,
}
_UPCAST = frozenset((
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.nansum.default,
    aten.prod.default, aten.prod.dim_int, aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default,
    aten.var.correction, aten.var_mean.correction, aten.std.correction, aten.std_mean.correction,
    aten.linalg_vector_norm.default,
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default, aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default,
    aten.index_add.default, aten.scatter_add.default, aten.scatter.reduce,
))  # fmt: skip
