"""Gradients of convolutions, and transposed convolutions, with the matmul precision.

torch_xla 2.9 lowers only the forward of a plain convolution with it. The others take one bfloat16 pass over the MXU,
whatever precision is set. XLA:CPU ignores the precision, so these forms are for a TPU's compiler alone.

The gradients of a convolution are convolutions. That of the input has the gradient of the result, dilated by the
stride, as its input, and the kernel reversed, with its channels exchanged (V. Dumoulin and F. Visin, "A guide to
convolution arithmetic for deep learning", section 4). That of the kernel sums over the batch, which becomes channels;
its kernel is the gradient of the result, dilated by the stride. A transposed convolution is the gradient of the input
of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kp_dynamo.compat import xla
from kp_dynamo.lowering.hlo_ops import convolution
from kp_dynamo.ops.optimization_barrier import keeps_barriers

aten = torch.ops.aten


@dataclass(frozen=True)
class _Window:
    """A convolution's window: one number for each spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls, x: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> _Window:
        rank = x.dim() - 2
        return cls(_each(rank, stride), _each(rank, padding), _each(rank, dilation), groups)

    def dilated(self, sizes: Sequence[int], by: Sequence[int]) -> list[int]:
        return [(size - 1) * step + 1 for size, step in zip(sizes, by, strict=True)]


def _each(rank: int, numbers: Sequence[int]) -> tuple[int, ...]:
    """A number for each spatial dimension: ATen also accepts one for all."""
    return tuple(numbers) * (rank if len(numbers) == 1 else 1)


def _of_input(gradient: Tensor, weight: Tensor, sizes: Sequence[int], window: _Window) -> Tensor:
    """The gradient of an input with spatial `sizes`: [N, O, ...] and [O, C / groups, ...] -> [N, C, ...]."""
    kernel = window.dilated(weight.shape[2:], window.dilation)
    before = [size - 1 - pad for size, pad in zip(kernel, window.padding, strict=True)]
    given = window.dilated(gradient.shape[2:], window.stride)
    after = [size + pad - g for size, pad, g in zip(sizes, window.padding, given, strict=True)]
    reversed_ = weight.flip([*range(2, weight.dim())])
    by_group = reversed_.unflatten(0, (window.groups, -1)).transpose(1, 2).flatten(0, 1)
    return convolution(
        gradient, by_group, strides=(1,) * len(sizes), padding=tuple(zip(before, after, strict=True)),
        x_dilation=window.stride, kernel_dilation=window.dilation, groups=window.groups, precision=_precision(),
    )  # fmt: skip


def _of_weight(x: Tensor, gradient: Tensor, sizes: Sequence[int], window: _Window) -> Tensor:
    """The gradient of a kernel with spatial `sizes`: [N, C, ...] and [N, O, ...] -> [O, C / groups, ...]."""
    kernel = window.dilated(gradient.shape[2:], window.stride)
    covered = [size + k - 1 for size, k in zip(window.dilated(sizes, window.dilation), kernel, strict=True)]
    after = [c - size - pad for c, size, pad in zip(covered, x.shape[2:], window.padding, strict=True)]
    batch_as_channels = x.unflatten(1, (window.groups, -1)).movedim(2, 0).transpose(1, 2).flatten(1, 2)
    found = convolution(
        batch_as_channels, gradient.transpose(0, 1), strides=window.dilation,
        padding=tuple(zip(window.padding, after, strict=True)), x_dilation=(1,) * len(sizes),
        kernel_dilation=window.stride, groups=window.groups, precision=_precision(),
    )  # fmt: skip
    return found.transpose(0, 1)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Any:
    stride, padding, dilation, transposed, output_padding, groups = settings
    if not transposed or not _takes_several_passes(x, weight):
        return aten.convolution.default(x, weight, bias, *settings)
    window = _Window.of(x, stride, padding, dilation, groups)
    kernel = window.dilated(weight.shape[2:], window.dilation)
    added = _each(x.dim() - 2, output_padding)
    given = window.dilated(x.shape[2:], window.stride)
    sizes = [g - 2 * p + k - 1 + a for g, p, k, a in zip(given, window.padding, kernel, added, strict=True)]
    result = _of_input(x, weight, sizes, window)
    return result if bias is None else result + bias.reshape(-1, *[1] * len(sizes))


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *settings: Any) -> Any:
    if not _takes_several_passes(gradient, x, weight):
        return aten.convolution_backward.default(gradient, x, weight, *settings)
    _, stride, padding, dilation, transposed, _, groups, (wants_x, wants_weight, wants_bias) = settings
    window = _Window.of(x, stride, padding, dilation, groups)
    of_x = of_weight = of_bias = None
    if wants_x and transposed:
        found = aten.convolution.default(gradient, weight, None, stride, padding, dilation, False, [0], groups)
        of_x = found[(..., *(slice(size) for size in x.shape[2:]))]
    elif wants_x:
        of_x = _of_input(gradient, weight, x.shape[2:], window)
    if wants_weight:
        one, other = (gradient, x) if transposed else (x, gradient)
        of_weight = _of_weight(one, other, weight.shape[2:], window)
    if wants_bias:
        of_bias = gradient.sum([0, *range(2, gradient.dim())])
    return of_x, of_weight, of_bias


def _takes_several_passes(*operands: Tensor) -> bool:
    is_wide = all(x.is_floating_point() and x.itemsize >= torch.float32.itemsize for x in operands)
    return keeps_barriers() and is_wide and _precision() != "default" and all(math.prod(x.shape) for x in operands)


def _precision() -> str:
    return str(xla.xlac()._xla_get_mat_mul_precision())  # torch_xla 2.9: what `settings` has set


CONVOLUTION_FORMS: dict[Any, Callable[..., Any]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
