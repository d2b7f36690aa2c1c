"""The operators whose fake tensors have other strides than eager's CPU kernels give (torch 2.9), with their rules.

`tests/autograd/test_eager_rules.py` compares real tensors with fake ones; this module lists what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kp_dynamo.autograd import kernel_strides as strides
from kp_dynamo.autograd.fft_strides import TRANSFORMS, spectrum, transformed
from kp_dynamo.autograd.memory_formats import empty_in_format

aten = torch.ops.aten
Rule = Callable[[Sequence[Any], torch.Tensor], torch.Tensor]

RULES: dict[Any, Rule] = {
    aten._fft_r2c.default: transformed,
    aten._fft_c2c.default: transformed,
    aten._fft_c2r.default: transformed,
    aten.index.Tensor: strides.indexed,
    aten.native_batch_norm.default: strides.dense,
    aten._native_batch_norm_legit.default: strides.dense,
    aten._native_batch_norm_legit.no_stats: strides.dense,
    aten._native_batch_norm_legit_no_training.default: strides.dense,
    aten._batch_norm_with_update.default: strides.dense,
    aten._batch_norm_no_update.default: strides.dense,
    aten.convolution.default: strides.convolved,
    aten.avg_pool2d.default: strides.suggested,
    aten.max_pool2d_with_indices.default: strides.suggested,
    aten.max_unpool2d.default: strides.suggested,
    aten.reflection_pad2d.default: strides.suggested,
    aten.reflection_pad3d.default: strides.suggested,
    aten.replication_pad2d.default: strides.suggested,
    aten.replication_pad3d.default: strides.suggested,
    aten.channel_shuffle.default: strides.suggested,
    aten.pixel_shuffle.default: strides.suggested,
    aten.pixel_unshuffle.default: strides.suggested,
    aten._adaptive_avg_pool2d.default: strides.suggested,
    aten.adaptive_max_pool2d.default: strides.suggested,
    aten.upsample_nearest2d.default: strides.suggested,
    aten._upsample_nearest_exact2d.default: strides.suggested,
    aten.upsample_bilinear2d.default: strides.suggested,
    aten.upsample_bicubic2d.default: strides.suggested,
    aten.im2col.default: strides.contiguous,
    aten.roll.default: strides.rolled,
    aten.cat.default: strides.joined,
    aten.stack.default: strides.stacked,
    aten.linalg_eig.default: strides.columns,
    aten.pow.Scalar: strides.contiguous,
    aten.binary_cross_entropy.default: strides.as_the_first,
    aten.nll_loss2d_forward.default: strides.contiguous,
    aten.native_dropout_backward.default: strides.elementwise,
    aten.logaddexp.default: strides.elementwise,
    aten.logical_and.default: strides.elementwise,
    aten.logical_or.default: strides.elementwise,
    aten.logical_xor.default: strides.elementwise,
    aten.heaviside.default: strides.elementwise,
    aten.normal.Tensor_Tensor: strides.contiguous,
    aten.xlogy.Tensor: strides.elementwise,
    aten.special_xlog1py.default: strides.elementwise,
    aten.log_sigmoid_forward.default: strides.contiguous,
    aten.rrelu_with_noise.default: strides.contiguous,
    aten.div.Tensor_mode: strides.elementwise,
    aten.floor_divide.default: strides.elementwise,
    aten.copysign.Tensor: strides.elementwise,
    aten.complex.default: strides.elementwise,
    aten.angle.default: strides.angle,
    aten.isin.Tensor_Tensor: strides.contiguous,
    aten.isin.Tensor_Scalar: strides.contiguous,
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.rsub.Scalar, aten.remainder.Scalar,
            aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
        ),
        strides.with_number,
    ),
    aten.select_scatter.default: strides.of_a_clone,
    aten.slice_scatter.default: strides.of_a_clone,
    aten.diagonal_scatter.default: strides.of_a_clone,
}  # fmt: skip

# Substrings of the names, in Dynamo's graphs, of functions that call these operators.
_NAMES = (
    "norm", "pool", "pad", "sigmoid", "rrelu", "div", "copysign", "scatter", "shuffle", "xlog", "normal",
    "boolean_dispatch", "fft", "roll", "cat", "stack", "eig", "pow", "ldexp", "nll_loss", "cross_entropy", "logical",
    "logaddexp", "heaviside", "complex", "angle", "isin", "dropout", "stft", "one_hot", "conv", "unfold", "im2col",
    "interpolate", "upsample",
)  # fmt: skip


@functools.cache
def may_call_operator_with_rule(name: str) -> bool:
    """Whether a function of this name may call an operator with a rule."""
    return any(part in name for part in _NAMES)


class EagerRules(TorchDispatchMode):
    """Mode in which fake results of the operators with a rule have eager's strides."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = spectrum(func, args) if func in TRANSFORMS else func(*args, **(kwargs or {}))
        rule = RULES.get(func)
        if rule is None:
            return results
        if isinstance(results, torch.Tensor):
            return rule(args, results)
        # Pool indices have the layout of the values; norm statistics have one dimension, eigenvalues have one fewer.
        rank = max(r.dim() for r in results if isinstance(r, torch.Tensor))
        return tuple(rule(args, r) if isinstance(r, torch.Tensor) and r.dim() == rank else r for r in results)


def after_function(target: Any, known: Any, value: Any) -> Any:
    """The rule of a function that selects its operators by the kind of tensor.

    `max_pool1d` without gradients has its own CPU kernel, which fake tensors do not reach; `one_hot` writes into zeros
    on the CPU, and compares for fake tensors.
    """
    if target is F.one_hot:
        return empty_in_format(value, torch.contiguous_format)
    is_own = target in (F.max_pool1d, torch.max_pool1d) and isinstance(known, torch.Tensor) and not known.requires_grad
    return empty_in_format(value, torch.contiguous_format) if is_own else value
