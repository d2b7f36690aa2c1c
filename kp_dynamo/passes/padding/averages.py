"""Average pools in floor mode: the sum of a window, divided by the element count that ATen uses at the true length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kp_dynamo.ops.compute_dtype import compute_dtype
from kp_dynamo.passes.padding.atoms import Padded, Refused, Size, plain
from kp_dynamo.passes.padding.call import Call
from kp_dynamo.passes.padding.masks import Number
from kp_dynamo.passes.padding.rules import aten, rule

_POOLS = {aten.avg_pool2d.default: 2, aten.avg_pool3d.default: 3}
_BACKWARDS = {aten.avg_pool2d_backward.default: 2, aten.avg_pool3d_backward.default: 3}


class _Pool(NamedTuple):
    """Windows over the last dimensions: size, stride and padding of each, and the divisor of their sums."""

    kernel: list[int]
    stride: list[int]
    pad: list[int]
    includes_pad: bool
    divisor: int | None

    @staticmethod
    def of(call: Call, first: int, rank: int) -> _Pool:
        """Read the arguments from `first` on."""
        given = call.arg(first), call.arg(first + 1) or call.arg(first), call.arg(first + 2, [0])
        if call.arg(first + 3, False):
            raise Refused("average pooling with ceil_mode=True is unsupported")
        kernel, stride, pad = (list(v) * rank if len(v) == 1 else list(v) for v in given)
        return _Pool(kernel, stride, pad, call.arg(first + 4, True), call.arg(first + 5))

    @property
    def plain(self) -> tuple[Any, ...]:
        """Arguments that make ATen divide by the window size; in floor mode no window extends past the padding."""
        return self.kernel, self.stride, self.pad, False, True, None

    def correction(self, call: Call, x: Padded, num: Sequence[Size]) -> torch.Tensor | float:
        """(window size) / (ATen's divisor), for `num` windows: a number, or a map of numbers."""
        window = math.prod(self.kernel)
        if self.divisor is not None:
            return window / self.divisor
        if self.includes_pad or not any(self.pad):
            return 1.0
        counts: Any = torch.ones((), dtype=torch.int64)
        first = len(x.dims) - len(num)
        for axis, size in enumerate(num):
            counts = counts.unsqueeze(-1) * self._counts(call, axis, size, call.masks.true_count(x, [first + axis]))
        return window / counts.to(compute_dtype(call.like.dtype))  # type: ignore[no-any-return]

    def _counts(self, call: Call, axis: int, num: Size, length: Number) -> torch.Tensor:
        """True elements in each window along an axis: int64[num]."""
        starts = call.masks.positions(num) * self.stride[axis] - self.pad[axis]
        ends = torch.minimum(starts + self.kernel[axis], torch.as_tensor(length))
        return ends - starts.clamp(min=0)


def _spatial(call: Call, x: Padded, rank: int) -> Padded:
    """`x` with zeros in the tails of its last `rank` dimensions."""
    dims = range(len(x.dims) - rank, len(x.dims))
    return x.replaced(call.masks.filled(x, dims, 0))


@rule(*_POOLS)
def _average_pool(call: Call) -> Padded:
    rank = _POOLS[call.target]
    pool, x, num = _Pool.of(call, 1, rank), _spatial(call, call.args[0], rank), call.like.shape[-rank:]
    means = call.run(x, *pool.plain) * pool.correction(call, x, num)
    return Padded(means.to(call.like.dtype), (*x.dims[:-rank], *plain(num)))


@rule(*_BACKWARDS)
def _average_pool_backward(call: Call) -> Padded:
    rank = _BACKWARDS[call.target]
    gradient, x = (_spatial(call, v, rank) for v in call.args[:2])
    pool = _Pool.of(call, 2, rank)
    shares = gradient.tensor * pool.correction(call, x, gradient.shape[-rank:])
    return x.replaced(call.run(shares.to(call.like.dtype), x, *pool.plain))
