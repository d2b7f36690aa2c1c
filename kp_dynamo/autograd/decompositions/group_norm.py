"""The gradients of group normalization, from the normalized values.

torch 2.9 decomposes them into sum(g * x) - mean * sum(g), where the deviations from the mean are the difference of two
large numbers. In a group of one element it is zero in exact arithmetic, and what rounding leaves of it is multiplied by
a gradient that may be 1e12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.ops.compute_dtype import compute_dtype

Maybe = torch.Tensor | None


def native_group_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    average: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    n: Any,
    channels: Any,
    size: Any,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Maybe, Maybe, Maybe]:
    """The gradients of x [n, channels, ...], weight and bias [channels]; None where none is wanted.

    Args:
        gradient: That of the result, in the shape of `x`.
        x: The input.
        average: The mean of each group, [n, groups].
        rstd: The reciprocal standard deviation of each group, [n, groups].
        weight: The scale of each channel, or None.
        n: Samples.
        channels: Channels.
        size: Elements of a channel.
        groups: Groups of channels.
        wanted: Which gradients are needed.
    """
    shape = [n, groups, channels // groups, size]
    grad, of_group = _wide(gradient).reshape(shape), [n, groups, 1, 1]
    rstd = _wide(rstd).reshape(of_group)
    normalized = (_wide(x).reshape(shape) - _wide(average).reshape(of_group)) * rstd
    scaled = grad if weight is None else grad * weight.reshape(1, groups, channels // groups, 1)
    of_x = _of_input(scaled, normalized, rstd).reshape(x.shape).to(x.dtype) if wanted[0] else None
    dtype = x.dtype if weight is None else weight.dtype
    of_weight = (grad * normalized).sum([0, 3]).reshape(channels).to(dtype) if wanted[1] else None
    of_bias = grad.sum([0, 3]).reshape(channels).to(dtype) if wanted[2] else None
    return of_x, of_weight, of_bias


def _of_input(scaled: torch.Tensor, normalized: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """The gradient without its mean and its component along the normalized values."""
    along = (scaled * normalized).mean([2, 3], keepdim=True)
    return (scaled - scaled.mean([2, 3], keepdim=True) - normalized * along) * rstd


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(compute_dtype(x.dtype))
