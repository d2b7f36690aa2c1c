"""Pools: torch_xla 2.9 returns index 2^32 - 1 for the maximum of a window of -inf, and rounds an average's divisor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kp_dynamo.lowering.hidden_constants import divided
from kp_dynamo.lowering.hlo_ops import window_sums

aten = torch.ops.aten

# Larger windows keep torch_xla's indices: each element takes a few nodes of the trace, and the indices may be unused.
_LARGEST_WINDOW = 128


@dataclass(frozen=True)
class _Windows:
    """The pooled dimensions: sizes and positions of the windows, and sizes of the result."""

    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    num: list[int]

    def padded(self, x: torch.Tensor, value: float) -> torch.Tensor:
        """`x` [..., *sizes], padded so that each window is inside."""
        pads: list[int] = []
        for axis, size in enumerate(x.shape[-len(self.kernel) :]):
            reach = (self.num[axis] - 1) * self.stride[axis] + (self.kernel[axis] - 1) * self.dilation[axis] + 1
            pads = [self.padding[axis], max(0, reach - size - self.padding[axis]), *pads]
        return F.pad(x, pads, value=value)

    def elements(self, padded: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
        """The element of each window at `offset`: [..., *num]."""
        for axis, place in enumerate(offset):
            start, dim = place * self.dilation[axis], axis - len(offset)
            end = start + (self.num[axis] - 1) * self.stride[axis] + 1
            padded = aten.slice.Tensor(padded, padded.dim() + dim, start, end, self.stride[axis])
        return padded


def _max_pool(op: Any, dims: int) -> Callable[..., Any]:
    def form(
        x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> Any:
        values, places = op(x, kernel, stride, padding, dilation, ceil_mode)
        size, step, pad, spread = (_of_each(v, dims) for v in (kernel, stride or kernel, padding, dilation))
        if math.prod(size) > _LARGEST_WINDOW or values.numel() == 0:
            return values, places
        return values, _places(x, _Windows(size, step, pad, spread, list(values.shape[-dims:])))

    return form


def _of_each(value: Any, dims: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _places(x: torch.Tensor, windows: _Windows) -> torch.Tensor:
    """As in ATen: scan a window from its first element, and move to every larger element and every NaN."""
    sizes = x.shape[-len(windows.kernel) :]
    numbers = torch.arange(math.prod(sizes), device=x.device).reshape(sizes)
    padded, numbers = windows.padded(x, -math.inf), windows.padded(numbers, -1)
    largest = place = None
    for offset in itertools.product(*map(range, windows.kernel)):
        value, number = windows.elements(padded, offset), windows.elements(numbers, offset)
        if largest is None or place is None:
            largest, place = value, number.expand(value.shape)
            continue
        is_next = (value > largest) | value.isnan() | (place < 0)
        largest, place = torch.where(is_next, value, largest), torch.where(is_next, number, place)
    assert place is not None
    return place


def _avg_pool(op: Any, dims: int) -> Callable[..., Any]:
    """Sums of windows, divided: torch_xla multiplies by the reciprocal of their size (`hidden_constants`)."""

    def form(
        x: torch.Tensor, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Any:  # fmt: skip
        size, step, pad = (_of_each(v, dims) for v in (kernel, stride or kernel, padding))
        if ceil_mode or (any(pad) and not count_include_pad) or not x.numel():
            return op(x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)
        padded = F.pad(x, [p for one in reversed(pad) for p in (one, one)]) if any(pad) else x
        sums = window_sums(padded, size, step)
        divisor = math.prod(size) if divisor_override is None else divisor_override
        return sums if divisor == 1 else divided(sums, divisor)

    return form


def _max_unpool(dims: int) -> Callable[..., Any]:
    """torch_xla drops values of -inf, because that is its initial value."""

    def form(x: torch.Tensor, places: torch.Tensor, sizes: Sequence[int], *_: Any) -> Any:
        outer = x.shape[:-dims]
        empty = torch.zeros([*outer, math.prod(sizes)], dtype=x.dtype, device=x.device)
        return empty.scatter(-1, places.flatten(-dims), x.flatten(-dims)).reshape([*outer, *sizes])

    return form


POOL_FORMS: dict[Any, Callable[..., Any]] = {
    aten.max_pool2d_with_indices.default: _max_pool(aten.max_pool2d_with_indices.default, 2),
    aten.max_pool3d_with_indices.default: _max_pool(aten.max_pool3d_with_indices.default, 3),
    aten.avg_pool2d.default: _avg_pool(aten.avg_pool2d.default, 2),
    aten.avg_pool3d.default: _avg_pool(aten.avg_pool3d.default, 3),
    aten.max_unpool2d.default: _max_unpool(2),
    aten.max_unpool3d.default: _max_unpool(3),
}
