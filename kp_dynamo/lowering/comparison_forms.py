"""Operators that compare a tensor with a number, which ATen first rounds to the dtype of the comparison.

torch_xla 2.9 compares in float64: a float32 of 0.3 is greater than 0.3, and `clamp` has no gradient at its bounds.
ATen's activations compare narrow floats in float32, its comparison operators in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import operands, wide
from kp_dynamo.lowering.elementwise_forms import number

aten = torch.ops.aten


def _compared(op: Any) -> Callable[..., torch.Tensor]:
    """`op`, which takes two tensors, for a tensor and a number."""
    return lambda x, value: op(*operands(x, value)[:2])


def _threshold(x: torch.Tensor, threshold: Any, value: Any) -> Any:
    """A NaN passes every threshold."""
    return torch.where(wide(x) <= number(threshold, wide(x)), number(value, x), x)


def _threshold_backward(gradient: torch.Tensor, x: torch.Tensor, threshold: Any) -> Any:
    return torch.where(wide(x) <= number(threshold, wide(x)), number(0, gradient), gradient)


def _hardtanh_backward(gradient: torch.Tensor, x: torch.Tensor, low: Any, high: Any) -> Any:
    """The bounds have no gradient: relu6 at 0."""
    x = wide(x)
    return torch.where((x > number(low, x)) & (x < number(high, x)), gradient, number(0, gradient))


def _hardsigmoid_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    return torch.where((x > -3) & (x < 3), gradient * (1 / 6), number(0, gradient))


def _hardswish_backward(gradient: torch.Tensor, x: torch.Tensor) -> Any:
    """The derivative is x / 3 + 1 / 2 between -3 and 3."""
    inside = (wide(gradient) * (wide(x) / 3 + 0.5)).to(gradient.dtype)
    return torch.where(x <= -3, number(0, gradient), torch.where(x >= 3, gradient, inside))


def _hardshrink(x: torch.Tensor, threshold: Any = 0.5) -> Any:
    return _shrink_backward(x, x, threshold)


def _shrink_backward(gradient: torch.Tensor, x: torch.Tensor, threshold: Any) -> Any:
    """The backward of both hardshrink and softshrink; neither shrinks a NaN."""
    is_small = (x >= number(-threshold, x)) & (x <= number(threshold, x))
    return torch.where(is_small, number(0, gradient), gradient)


def _softplus(x: torch.Tensor, beta: Any = 1, threshold: Any = 20) -> Any:
    scaled = wide(x) * beta
    return torch.where(scaled > number(threshold, scaled), x, (scaled.exp().log1p() / beta).to(x.dtype))


def _softplus_backward(gradient: torch.Tensor, x: torch.Tensor, beta: Any, threshold: Any) -> Any:
    scaled = wide(x) * beta
    inside = (wide(gradient) * scaled.sigmoid()).to(gradient.dtype)
    return torch.where(scaled > number(threshold, scaled), gradient, inside)


COMPARISON_FORMS: dict[Any, Callable[..., Any]] = {
    **{packet.Scalar: _compared(packet.Tensor) for packet in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)},
    aten.threshold.default: _threshold,
    aten.threshold_backward.default: _threshold_backward,
    aten.hardtanh_backward.default: _hardtanh_backward,
    aten.hardsigmoid_backward.default: _hardsigmoid_backward,
    aten.hardswish_backward.default: _hardswish_backward,
    aten.hardshrink.default: _hardshrink,
    aten.hardshrink_backward.default: _shrink_backward,
    aten.softshrink_backward.default: _shrink_backward,
    aten.softplus.default: _softplus,
    aten.softplus_backward.default: _softplus_backward,
}
