"""The table of decompositions: torch's own where they are right, and ours."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from kp_dynamo.autograd.decompositions.distances import pdist_forward
from kp_dynamo.autograd.decompositions.embedding_bags import embedding_bag_decompositions
from kp_dynamo.autograd.decompositions.float64_precision import float64_decompositions
from kp_dynamo.autograd.decompositions.group_norm import native_group_norm_backward
from kp_dynamo.autograd.decompositions.integer_division import RIGHT_SHIFTS, div_mode, floor_divide, right_shift
from kp_dynamo.autograd.decompositions.lists import list_decompositions
from kp_dynamo.autograd.decompositions.nan_order import order_decompositions
from kp_dynamo.autograd.decompositions.patches import patch_decompositions
from kp_dynamo.autograd.decompositions.pooling import avg_pool, avg_pool_backward
from kp_dynamo.autograd.decompositions.unbatched_losses import unbatched_loss_decompositions
from kp_dynamo.autograd.decompositions.weight_norm import weight_norm_interface_backward
from kp_dynamo.autograd.decompositions.windows import window_decompositions
from kp_dynamo.compat import xla
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.ops.encoder_layer import native_multi_head_attention, transformer_encoder_layer

aten = torch.ops.aten

# torch_xla 2.9 lowers these, and the result is wrong.
_WRONG_IN_TORCH_XLA: list[Any] = [
    # Updates the running variance with the biased variance of the batch, computed as the mean of squares minus the
    # square of the mean: NaN if the mean is 3000 deviations. Ours reads its input twice, which costs 0.10 ms in the
    # forward of a small ResNet, by a v5e's compiler (0.56 cycles ms instead of 0.46).
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    # Scales by a mask that is itself scaled.
    aten.native_dropout_backward,
    # The gradient ignores alpha and uses 1.
    aten.elu,
    aten.elu_backward,
    # exp(x / alpha) - 1 cancels for small x.
    aten.celu,
    # Does not clamp if eps is given.
    aten.logit,
    # log(1 - x) cancels for small x.
    aten.binary_cross_entropy,
    # Raise to the power p, also if it is infinite, and run on the CPU if it is 0. `linalg_vector_norm` has a form.
    aten.norm,
    aten.dist,
]

# View ops without an XLA kernel: their C++ form is as good and faster to trace.
_VIEW_OPS = {aten.transpose.int, aten.squeeze.default, aten.squeeze.dim, aten.unbind.int, aten.split.Tensor}


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """For AOTAutograd: operators that torch_xla gets wrong, or does not lower and torch can decompose."""
    table: dict[Any, Callable[..., Any]] = {
        op: decomposition
        for op, decomposition in _aten_decompositions().items()
        if op not in _VIEW_OPS and not _has_lowering(op)
    }
    table.update(get_decompositions(_WRONG_IN_TORCH_XLA))
    table.update(float64_decompositions())
    table.update(order_decompositions())
    table.update(embedding_bag_decompositions())
    table.update(list_decompositions())
    table.update(unbatched_loss_decompositions())
    table[aten.native_dropout.default] = _native_dropout
    table[aten.native_group_norm_backward.default] = native_group_norm_backward
    table[aten.native_layer_norm_backward.default] = _layer_norm_backward
    table[aten._weight_norm_interface_backward.default] = weight_norm_interface_backward
    table[aten._pdist_forward.default] = pdist_forward
    table[aten.abs.default] = _abs
    table[aten.hypot.default] = _hypot
    # torch_xla 2.9's roll divides by the size of the dimension, and aborts the process if the size is 0.
    # Its linspace computes in float32 for every dtype.
    table.update(get_decompositions([aten.roll, aten.linspace]))
    # torch_xla 2.9 computes them on the CPU while it traces.
    table.update(get_decompositions([aten.triu_indices, aten.tril_indices]))
    table.update(patch_decompositions(get_decompositions([aten.im2col, aten.col2im])))
    table.update(window_decompositions(get_decompositions([aten.unfold_backward])))
    table[aten.avg_pool2d.default] = table[aten.avg_pool3d.default] = avg_pool
    table[aten.avg_pool2d_backward.default] = table[aten.avg_pool3d_backward.default] = avg_pool_backward
    table[aten.floor_divide.default] = table[aten.floor_divide.Scalar] = floor_divide
    table[aten.div.Tensor_mode] = table[aten.div.Scalar_mode] = div_mode
    for op in RIGHT_SHIFTS:
        table[op] = right_shift
    table[aten.randperm.default] = _randperm
    table[aten._native_multi_head_attention.default] = native_multi_head_attention
    table[aten._transformer_encoder_layer_fwd.default] = transformer_encoder_layer
    for op in (aten.cumsum.default, aten.cumprod.default):
        table[op] = partial(_accumulated_in_int64, op)
    for op in (aten.addmm.default, aten.addmv.default, aten.baddbmm.default, aten.addbmm.default, aten.addr.default):
        before = table.get(op)
        table[op] = partial(_without_addend, op, before)
    for op in (aten.index.Tensor, aten.index_put.default):
        table[op] = partial(_with_equal_indices, op)
    for op in (aten.huber_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.mse_loss_backward.default):
        table[op] = partial(_unless_empty, table.get(op))
    table[aten._unique.default] = _unique
    table[aten.index_fill.int_Scalar] = table[aten.index_fill.int_Tensor] = _index_fill
    return table


def _layer_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    shape: Any,
    average: torch.Tensor,
    rstd: torch.Tensor,
    weight: Any,
    *rest: Any,
) -> Any:
    """With a weight of a wider dtype, whose gradient torch's fake tensors round to the dtype of `x`."""
    if weight is None or weight.dtype == x.dtype:
        return NotImplemented
    wide = gradient.to(weight.dtype), x.to(weight.dtype)
    of_x, *of_parameters = aten.native_layer_norm_backward(*wide, shape, average, rstd, weight, *rest)
    return None if of_x is None else of_x.to(x.dtype), *of_parameters


def _aten_decompositions() -> dict[Any, Callable[..., Any]]:
    """torch's table for ATen alone.

    To read a `CustomDecompTable` as a dict adds the composite operators of all other namespaces, which takes 0.1 s. The
    dispatcher decomposes those anyway.
    """
    return core_aten_decompositions().decomp_table


def _with_equal_indices(op: Any, x: torch.Tensor, indices: Any, *rest: Any, **kwargs: Any) -> Any:
    """Use indices of one dtype, and broadcast 0-dim indices to the others.

    torch_xla 2.9 concatenates the indices and fails if int32 and int64 are mixed. torch 2.9's fake tensors do not
    broadcast a 0-dim index on the CPU, and use its shape for all.
    """
    given = [i for i in indices if i is not None]
    equal = [i.long() for i in given] if {i.dtype for i in given} == {torch.int32, torch.int64} else given
    if len({i.dim() > 0 for i in given}) > 1 and not any(i.dtype in (torch.bool, torch.uint8) for i in given):
        equal = list(torch.broadcast_tensors(*equal))
    if equal is given:
        return NotImplemented
    rest_of = iter(equal)
    return op(x, [None if i is None else next(rest_of) for i in indices], *rest, **kwargs)


_MATMUL: dict[Any, Callable[..., torch.Tensor]] = {
    aten.addmm.default: torch.mm,
    aten.addmv.default: torch.mv,
    aten.baddbmm.default: torch.bmm,
    aten.addbmm.default: lambda a, b: torch.bmm(a, b).sum(0),
    aten.addr.default: torch.outer,
}


def _without_addend(
    op: Any, fallback: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    """torch_xla 2.9 multiplies the addend by a `beta` of 0, which keeps a NaN; ATen ignores the addend."""
    if beta != 0:
        return NotImplemented if fallback is None else fallback(x, a, b, beta=beta, alpha=alpha)
    matmul = _MATMUL[op](a, b)
    matmul = matmul if alpha == 1 else matmul * alpha
    return matmul.expand(torch.broadcast_shapes(x.shape, matmul.shape)).to(x.dtype)


def _unless_empty(fallback: Any, gradient: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    """torch 2.9's own forms divide by the number of elements, even if it is 0."""
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return torch.zeros_like(x)
    return NotImplemented if fallback is None else fallback(gradient, x, *args)


def _unique(index: torch.Tensor, *args: Any) -> Any:
    """Used by autograd for the gradient of the value; torch 2.9 traces it as one index, whatever their number."""
    raise XLACompilationError(
        "index_fill with a tensor value that requires grad is unsupported: its gradient depends on the number of "
        "distinct indices, and a program has fixed sizes. Allowed: torch.where(mask, value, x), or a value without grad"
    )


def _index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> Any:
    """torch 2.9's own form copies in place, which AOTAutograd graphs forbid: gradients of `index_copy` failed."""
    fill = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    whole = x if x.dim() else x.reshape(1)
    indices = [None] * (dim % whole.dim()) + [index.reshape(-1)]
    return aten.index_put(whole, indices, fill.to(x.dtype)).reshape(x.shape)


def _has_lowering(op: Any) -> bool:
    xla.xlac()
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "XLA")


def _accumulated_in_int64(op: Any, x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    """torch_xla 2.9 accumulates integers and booleans in their own dtype, or reports another; ATen uses int64."""
    dtype = dtype or (torch.int64 if _is_integral(x.dtype) else x.dtype)
    if dtype == x.dtype and (dtype == torch.int64 or not _is_integral(dtype)):
        return NotImplemented
    if not _is_integral(dtype):
        return op(x.to(dtype), dim)
    return op(x.to(dtype).to(torch.int64), dim).to(dtype)


def _is_integral(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _randperm(n: int, *, dtype: torch.dtype = torch.int64, **_: Any) -> torch.Tensor:
    """torch_xla 2.9 shuffles with a generator that cannot be seeded. Two of n 53-bit draws are hardly ever equal."""
    return torch.rand(n, dtype=torch.float64).argsort().to(dtype)


def _abs(x: torch.Tensor) -> torch.Tensor:
    """torch_xla 2.9 returns the absolute value of complex numbers as complex numbers."""
    return _hypot(x.real, x.imag) if x.is_complex() else NotImplemented


def _hypot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sqrt(a^2 + b^2) without intermediate overflow."""
    dtype = torch.result_type(a, b)
    narrow = dtype in (torch.bfloat16, torch.float16)
    a, b = (x.to(torch.float32 if narrow else dtype) for x in (a, b))
    large, small = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = torch.where(large == 0, 0.0, small / large)
    is_infinite = a.isinf() | b.isinf()  # whatever the other is, even NaN
    return torch.where(is_infinite, math.inf, large * (1 + ratio * ratio).sqrt()).to(dtype)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """torch_xla 2.9 scales kept elements by 1/p instead of 1/(1-p). An infinity or a NaN times 0 is NaN."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return x * 0, torch.zeros_like(x, dtype=torch.bool)
    mask = torch.rand_like(x, dtype=torch.float32) >= p
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale, zero = (torch.full((), value, dtype=wide.dtype) for value in (1.0 / (1.0 - p), 0.0))
    return (wide * torch.where(mask, scale, zero)).to(x.dtype), mask
