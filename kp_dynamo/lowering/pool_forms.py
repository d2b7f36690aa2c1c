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

# Larger windows are made of halves: a scan takes a few nodes of the trace for each element, and may be unused.
_LARGEST_SCANNED = 128

_Found = tuple[torch.Tensor, torch.Tensor]  # the largest value of each window, and its place


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
        if values.numel() == 0:
            return values, places
        find = _scanned if math.prod(size) <= _LARGEST_SCANNED else _halved
        return values, find(x, _Windows(size, step, pad, spread, list(values.shape[-dims:])))

    return form


def _adaptive_max_pool2d(x: torch.Tensor, sizes: Sequence[int]) -> Any:
    """Windows of one size. torch_xla has no lowering for others."""
    if not x.numel() or any(whole % part for whole, part in zip(x.shape[-2:], sizes, strict=True)):
        return aten.adaptive_max_pool2d.default(x, sizes)
    kernel = [whole // part for whole, part in zip(x.shape[-2:], sizes, strict=True)]
    return _MAX_POOL2D(x, kernel, kernel)


def _of_each(value: Any, dims: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _scanned(x: torch.Tensor, windows: _Windows) -> torch.Tensor:
    """The places of the maxima, as in ATen: scan each window from its first element."""
    padded, numbers = _numbered(x, windows)
    found: _Found | None = None
    for offset in itertools.product(*map(range, windows.kernel)):
        one = windows.elements(padded, offset), windows.elements(numbers, offset)
        found = one if found is None else _later(found, one)
    assert found is not None
    return found[1].expand(found[0].shape)


def _halved(x: torch.Tensor, windows: _Windows) -> torch.Tensor:
    """The same places: a window of n elements is one of m and a later one of m, which may overlap."""
    found = _numbered(x, windows)
    dims = len(windows.kernel)
    for axis in reversed(range(dims)):  # the elements of a row first
        length, dim, spread = 1, x.dim() + axis - dims, windows.dilation[axis]
        while length < windows.kernel[axis]:
            step = min(length, windows.kernel[axis] - length)
            found, length = _both_of(found, dim, step * spread), length + step
    values, places = found
    return windows.elements(places.expand(values.shape), [0] * dims)


def _both_of(found: _Found, dim: int, step: int) -> _Found:
    """Each window of a dimension and the one `step` after it, as one window."""
    values, places = found[0], found[1].expand(found[0].shape)
    num = values.shape[dim] - step
    first, second = ((values.narrow(dim, start, num), places.narrow(dim, start, num)) for start in (0, step))
    return _later(first, second)


def _numbered(x: torch.Tensor, windows: _Windows) -> _Found:
    """The padded elements, and their places; that of padding is negative."""
    sizes = x.shape[-len(windows.kernel) :]
    numbers = torch.arange(math.prod(sizes), device=x.device).reshape(sizes)
    return windows.padded(x, -math.inf), windows.padded(numbers, -1)


def _later(found: _Found, later: _Found) -> _Found:
    """As in ATen: move on to every larger element and every NaN."""
    (largest, place), (value, number) = found, later
    is_next = (value > largest) | value.isnan() | (place < 0)
    return torch.where(is_next, value, largest), torch.where(is_next, number, place)


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


_MAX_POOL2D = _max_pool(aten.max_pool2d_with_indices.default, 2)

POOL_FORMS: dict[Any, Callable[..., Any]] = {
    aten.adaptive_max_pool2d.default: _adaptive_max_pool2d,
    aten.max_pool2d_with_indices.default: _MAX_POOL2D,
    aten.max_pool3d_with_indices.default: _max_pool(aten.max_pool3d_with_indices.default, 3),
    aten.avg_pool2d.default: _avg_pool(aten.avg_pool2d.default, 2),
    aten.avg_pool3d.default: _avg_pool(aten.avg_pool3d.default, 3),
    aten.max_unpool2d.default: _max_unpool(2),
    aten.max_unpool3d.default: _max_unpool(3),
}
