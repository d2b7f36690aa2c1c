"""Average pooling in the only form that torch_xla 2.9 lowers correctly: every window is inside its input.

With `ceil_mode`, `count_include_pad=False` or `divisor_override`, torch_xla divides by the wrong count. Here, the input
is padded, the windows are summed, and each sum is divided by ATen's divisor, a constant map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten


@dataclass(frozen=True)
class _Axis:
    """One pooled dimension: its size, and the window's size, stride and padding; `num` outputs."""

    size: int
    kernel: int
    stride: int
    pad: int
    num: int

    @property
    def pad_right(self) -> int:
        """Zeros on the right so that the last window is inside; negative if the input is longer than needed."""
        return (self.num - 1) * self.stride + self.kernel - self.pad - self.size

    def counts(self, include_pad: bool) -> torch.Tensor:
        """The number of elements ATen counts per window: float64 [num], computed, as a trace takes no literals."""
        starts = torch.arange(self.num, dtype=torch.float64) * self.stride - self.pad
        ends = (starts + self.kernel).clamp(max=self.size + self.pad)
        return ends - starts if include_pad else ends.clamp(max=self.size) - starts.clamp(min=0)


def _axes(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool
) -> list[_Axis]:
    dims = len(kernel)
    every = [list(v) * dims if len(v) == 1 else list(v) for v in (kernel, stride or kernel, padding)]
    return [_axis(int(size), k, s, p, ceil) for size, k, s, p in zip(x.shape[-dims:], *every, strict=True)]


def _axis(size: int, kernel: int, stride: int, pad: int, ceil: bool) -> _Axis:
    steps = (size + 2 * pad - kernel) / stride
    num = (math.ceil(steps) if ceil else math.floor(steps)) + 1
    # ATen drops a last window that would start in the padding on the right.
    if ceil and (num - 1) * stride >= size + pad:
        num -= 1
    return _Axis(size, kernel, stride, pad, num)


def _divisor(x: torch.Tensor, axes: list[_Axis], include_pad: bool, divisor: int | None) -> torch.Tensor | int:
    """ATen's divisor of the sum of a window: a number, or a map [num, ...] of the pooled dimensions."""
    if divisor is not None:
        return divisor
    total = torch.ones((), dtype=torch.float64)
    for axis in axes:
        total = total.unsqueeze(-1) * axis.counts(include_pad)
    return total.to(x.dtype)


def avg_pool(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """`aten.avg_pool2d` and `aten.avg_pool3d` in the form above: x [..., *spatial]."""
    axes = _plan(x, kernel_size, stride, padding, ceil_mode)
    if axes is None or not _is_wrong_in_torch_xla(axes, count_include_pad, divisor_override):
        return NotImplemented
    pool = F.avg_pool2d if len(axes) == 2 else F.avg_pool3d
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x  # a sum may overflow; its average does not
    sums = pool(F.pad(wide, _pads(axes)), [a.kernel for a in axes], [a.stride for a in axes], divisor_override=1)
    return (sums / _divisor(wide, axes, count_include_pad, divisor_override)).to(x.dtype)


def avg_pool_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """The gradient of `avg_pool` with respect to `x`, in the form above."""
    axes = _plan(x, kernel_size, stride, padding, ceil_mode)
    if axes is None or not _is_wrong_in_torch_xla(axes, count_include_pad, divisor_override):
        return NotImplemented
    backward = aten.avg_pool2d_backward if len(axes) == 2 else aten.avg_pool3d_backward
    padded = F.pad(x, _pads(axes))
    window = math.prod(axis.kernel for axis in axes)
    corrected = grad * (window / _divisor(x, axes, count_include_pad, divisor_override))
    zeros = [0] * len(axes)
    strides = [a.stride for a in axes]
    inner = backward(corrected, padded, [a.kernel for a in axes], strides, zeros, False, True, None)
    return F.pad(inner, [-p for p in _pads(axes)])


def _plan(x: torch.Tensor, kernel: Any, stride: Any, padding: Any, ceil: bool) -> list[_Axis] | None:
    if any(isinstance(size, torch.SymInt) for size in x.shape):
        return None
    return _axes(x, kernel, stride, padding, ceil)


def _is_wrong_in_torch_xla(axes: list[_Axis], include_pad: bool, divisor: int | None) -> bool:
    overhangs = any(axis.pad_right > axis.pad for axis in axes)
    is_padded = any(axis.pad for axis in axes)
    return divisor not in (None, 1) or overhangs or (is_padded and not include_pad)


def _pads(axes: list[_Axis]) -> list[int]:
    """For `F.pad`: last dimension first."""
    return [p for axis in reversed(axes) for p in (axis.pad, axis.pad_right)]
