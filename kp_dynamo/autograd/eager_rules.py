"""Strides of eager's CPU kernels, for the operators whose fake tensors have different strides (torch 2.9).

`tests/autograd/test_eager_rules.py` compares real tensors with fake ones; this module lists what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm, make_contiguous_strides_for
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
Rule = Callable[[Sequence[Any], torch.Tensor], torch.Tensor]


def _contiguous(_: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Kernels that write to an empty contiguous tensor, whatever the operand's strides."""
    return _empty(result, torch.contiguous_format)


def _dense(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Channels last if the operand is dense and channels last, else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(args[0].dim())
    is_last = wanted is not None and not args[0].is_contiguous() and args[0].is_contiguous(memory_format=wanted)
    return _empty(result, wanted if is_last and wanted is not None else torch.contiguous_format)


def _suggested(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Channels last if the operand is, else contiguous."""
    return _empty(result, suggested_format(args[0]))


def _rolled(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """One concatenation per dimension: channels last if both parts are; an empty part is contiguous."""
    x: torch.Tensor = args[0]
    shifts, dims = args[1], args[2] if len(args) > 2 else []
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return x.clone()
    is_whole = any(
        isinstance(x.shape[d], int) and shift % x.shape[d] == 0 for shift, d in zip(shifts, dims, strict=False)
    )
    return _suggested(args, result) if dims and not is_whole else _contiguous(args, result)


def _joined(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """`cat_compute_output_memory_format` (TensorShape.h), which also reads strides of dimensions of one element."""
    formats = {suggested_format(part) for part in args[0]}
    return _empty(result, formats.pop() if len(formats) == 1 else torch.contiguous_format)


def _stacked(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """After the last dimension, a concatenation of unsqueezed parts; else a view of one, as for fake tensors."""
    is_last = len(args) > 1 and args[1] in (-1, args[0][0].dim())
    return _joined(([part.unsqueeze(-1) for part in args[0]],), result) if is_last else result


def _angle(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """The angle of complex numbers is written to an empty tensor."""
    return _contiguous(args, result) if args[0].is_complex() else result


def _as_the_first(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Kernels that write to `empty_like` of their first operand; a decomposition also reads the others."""
    return torch.empty_like(args[0]) if result.dim() == args[0].dim() else result


def _columns(_: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Column-major matrices, as from LAPACK."""
    *batch, rows, columns = range(result.dim())
    return _permuted(result, [*batch, columns, rows])


def _elementwise(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Like the sum of the operands: torch's references return a contiguous result if one operand is 0-dim."""
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.dim() > 0]
    if not tensors:
        return result
    total = tensors[0] + 0 if len(tensors) == 1 else torch.add(*tensors[:2])
    return total.to(result.dtype)


def _with_number(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Like with a 0-dim tensor: eager's kernel orders dimensions of one element by their strides.

    Fake tensors make the result of a contiguous operand and a number contiguous.
    """
    tensors = [a for a in args[:2] if isinstance(a, torch.Tensor)]
    if len(tensors) != 1 or not tensors[0].dim():
        return result
    return (tensors[0] + torch.zeros((), dtype=tensors[0].dtype)).to(result.dtype)


def _of_a_clone(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Scatters into an expanded tensor: eager clones the full tensor, the decomposition keeps strides of 0."""
    return args[0].clone() if any(_is_zero(step) for step in args[0].stride()) else result


def _indexed(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Ordered by the strides of operand and indices together; fake tensors only use the operand."""
    x, given = args[0], list(args[1])
    at = [d for d, index in enumerate(given) if index is not None]
    indices = [given[d] for d in at]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return result  # the shape depends on how many elements are true
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    is_together = at[-1] - at[0] == len(at) - 1
    first = at[0] if is_together else 0
    rest = x
    for d in reversed(at):
        rest = rest.select(d, 0)
    for _ in shape:
        rest = rest.unsqueeze(first)
    trailing = (None,) * (result.dim() - first - len(shape))
    whole = [index.expand(shape)[(*(None,) * first, ..., *trailing)] for index in indices]
    order = compute_elementwise_output_logical_to_physical_perm(*(t.expand(result.shape) for t in (rest, *whole)))
    return _permuted(result, order)


def _transformed(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """MKL transforms: the other dimensions outermost, by stride, then the transformed ones (SpectralOps.cpp)."""
    x, dims = args[0], list(args[1])
    if not torch.backends.mkl.is_available():
        return _empty(result, torch.contiguous_format)
    if not x.is_complex():  # the last is transformed first, and halved
        return _permuted(result, _batch_order(x, dims) + _by_strides(x, dims[:-1]) + dims[-1:])
    if result.is_complex():
        return _permuted(result, _batch_order(x, dims) + _by_strides(x, dims))
    if len(dims) > 1:  # a complex transform of all dimensions but the last, then one of the last
        x = _transformed((x, dims[:-1]), x)
    return _permuted(result, _batch_order(x, dims[-1:]) + dims[-1:])


def _convolved(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Eager runs a 1-d convolution as a 2-d one whose first dimension has one element (Convolution.cpp).

    Fake tensors ignore the memory format that results from that.
    """
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
    if weight.dim() != 3:
        return result
    image, kernel = x.contiguous().unsqueeze(2), weight.unsqueeze(2)
    memory_format = torch.contiguous_format
    if {suggested_format(image), suggested_format(kernel)} != {memory_format}:
        geometry = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups
        backend = torch._C._select_conv_backend(image, kernel, None, *geometry)
        memory_format = torch._C._conv_determine_backend_memory_format(image, kernel, backend)
    return _empty(result.unsqueeze(2), memory_format).squeeze(2)


def _batch_order(x: torch.Tensor, dims: Sequence[int]) -> list[int]:
    return _by_strides(x, [d for d in range(x.dim()) if d not in dims])


def _by_strides(x: torch.Tensor, dims: Sequence[int]) -> list[int]:
    return sorted(dims, key=x.stride, reverse=True)


def _permuted(like: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    return torch.empty_permuted(like.shape, list(order), dtype=like.dtype, device=like.device)


RULES: dict[Any, Rule] = {
    aten._fft_r2c.default: _transformed,
    aten._fft_c2c.default: _transformed,
    aten._fft_c2r.default: _transformed,
    aten.index.Tensor: _indexed,
    aten.native_batch_norm.default: _dense,
    aten._native_batch_norm_legit.default: _dense,
    aten._native_batch_norm_legit.no_stats: _dense,
    aten._native_batch_norm_legit_no_training.default: _dense,
    aten._batch_norm_with_update.default: _dense,
    aten._batch_norm_no_update.default: _dense,
    aten.convolution.default: _convolved,
    aten.avg_pool2d.default: _suggested,
    aten.max_pool2d_with_indices.default: _suggested,
    aten.max_unpool2d.default: _suggested,
    aten.reflection_pad2d.default: _suggested,
    aten.reflection_pad3d.default: _suggested,
    aten.replication_pad2d.default: _suggested,
    aten.replication_pad3d.default: _suggested,
    aten.channel_shuffle.default: _suggested,
    aten.roll.default: _rolled,
    aten.cat.default: _joined,
    aten.stack.default: _stacked,
    aten.linalg_eig.default: _columns,
    aten.pow.Scalar: _contiguous,
    aten.binary_cross_entropy.default: _as_the_first,
    aten.nll_loss2d_forward.default: _contiguous,
    aten.native_dropout_backward.default: _elementwise,
    aten.logaddexp.default: _elementwise,
    aten.logical_and.default: _elementwise,
    aten.logical_or.default: _elementwise,
    aten.logical_xor.default: _elementwise,
    aten.heaviside.default: _elementwise,
    aten.normal.Tensor_Tensor: _contiguous,
    aten.xlogy.Tensor: _elementwise,
    aten.special_xlog1py.default: _elementwise,
    aten.log_sigmoid_forward.default: _contiguous,
    aten.rrelu_with_noise.default: _contiguous,
    aten.div.Tensor_mode: _elementwise,
    aten.floor_divide.default: _elementwise,
    aten.copysign.Tensor: _elementwise,
    aten.complex.default: _elementwise,
    aten.angle.default: _angle,
    aten.isin.Tensor_Tensor: _contiguous,
    aten.isin.Tensor_Scalar: _contiguous,
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar, aten.remainder.Scalar,
            aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
        ),
        _with_number,
    ),
    aten.select_scatter.default: _of_a_clone,
    aten.slice_scatter.default: _of_a_clone,
    aten.diagonal_scatter.default: _of_a_clone,
}  # fmt: skip

# Substrings of the names, in Dynamo's graphs, of functions that call these operators.
_NAMES = (
    "norm", "pool", "pad", "sigmoid", "rrelu", "div", "copysign", "scatter", "shuffle", "xlog", "normal",
    "boolean_dispatch", "fft", "roll", "cat", "stack", "eig", "pow", "ldexp", "nll_loss", "cross_entropy", "logical",
    "logaddexp", "heaviside", "complex", "angle", "isin", "dropout", "stft", "one_hot", "conv",
)  # fmt: skip


@functools.cache
def may_call_operator_with_rule(name: str) -> bool:
    """Whether a function of this name may call an operator with a rule."""
    return any(part in name for part in _NAMES)


_TRANSFORMS = (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)


def _spectrum(func: Any, args: Sequence[Any]) -> Any:
    """A tensor of the shape and dtype of an FFT result: torch's fake kernels fail for some symbolic sizes."""
    x, dims = args[0], args[1]
    if func is aten._fft_c2c.default:
        return torch.empty_like(x)
    shape = list(x.shape)
    if func is aten._fft_c2r.default:
        shape[dims[-1]] = args[3]
        return x.new_empty(shape, dtype=x.dtype.to_real())
    if args[3]:  # one-sided
        shape[dims[-1]] = shape[dims[-1]] // 2 + 1
    return x.new_empty(shape, dtype=x.dtype.to_complex())


class EagerRules(TorchDispatchMode):
    """Mode in which fake results of the operators with a rule have eager's strides."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = _spectrum(func, args) if func in _TRANSFORMS else func(*args, **(kwargs or {}))
        rule = RULES.get(func)
        if rule is None:
            return results
        if isinstance(results, torch.Tensor):
            return rule(args, results)
        # Pool indices have the layout of the values; norm statistics have one dimension, eigenvalues have one fewer.
        rank = max(r.dim() for r in results if isinstance(r, torch.Tensor))
        return tuple(rule(args, r) if isinstance(r, torch.Tensor) and r.dim() == rank else r for r in results)


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """ATen's `suggest_memory_format` of a tensor."""
    order = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}.get(tensor.dim())
    if order is None or not _is_like(tensor, order):
        return torch.contiguous_format
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


def _is_like(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """`is_channels_last_strides_2d_s4` and `_3d_s5` of c10/core/MemoryFormat.h."""
    least: Any = 0
    steps = tensor.stride()
    if steps[1] == 0:
        return False
    for d in order:
        if tensor.shape[d] == 0 or steps[d] < least or (d == 0 and least == steps[1]):
            return False
        least = steps[d] * tensor.shape[d] if tensor.shape[d] > 1 else steps[d]
    return True


def _empty(like: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=memory_format)


def has_free_strides(value: Any) -> bool:
    """Whether a contiguous tensor has strides, in dimensions of one element, that a new tensor would not have.

    Only for static sizes, because symbolic ones would add guards.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    if not all(isinstance(n, int) for n in (*value.shape, *value.stride())) or 1 not in value.shape:
        return False
    return value.is_contiguous() and value.stride() != make_contiguous_strides_for(value.shape)


def _is_zero(step: Any) -> bool:
    return isinstance(step, int) and step == 0


def same_strides(one: Any, other: Any) -> bool:
    """Whether the tensors in two values have the same strides, compared as text."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
    return all(_strides_text(a) == _strides_text(b) for a, b in pairs)


def _strides_text(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return ""
    return f"{value.stride()} {value.storage_offset()}"


def after_function(target: Any, known: Any, value: Any) -> Any:
    """The rule of a function that selects its operators by the kind of tensor.

    `max_pool1d` without gradients has its own CPU kernel, which fake tensors do not reach; `one_hot` writes into zeros
    on the CPU, and compares for fake tensors.
    """
    if target is F.one_hot:
        return _empty(value, torch.contiguous_format)
    is_own = target in (F.max_pool1d, torch.max_pool1d) and isinstance(known, torch.Tensor) and not known.requires_grad
    return _empty(value, torch.contiguous_format) if is_own else value
