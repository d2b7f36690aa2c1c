"""Elementwise losses and their gradients, which torch_xla 2.9 rounds at each step or divides by a rounded count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import wide
from kp_dynamo.lowering.elementwise_forms import number
from kp_dynamo.lowering.hidden_constants import divided

aten = torch.ops.aten

_NONE, _MEAN = 0, 1


def _cross_entropy_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: Any = None, reduction: int = _MEAN
) -> Any:
    """For a mean, torch_xla multiplies by 1 / N in the dtype of `x`: in float16 that is 0 for 65,520 elements."""
    if reduction != _MEAN:
        return aten.binary_cross_entropy_backward.default(gradient, x, target, weight, reduction)
    of_each = aten.binary_cross_entropy_backward.default(gradient, x, target, weight, _NONE)
    return divided(wide(of_each), x.numel()).to(x.dtype)


def _smooth_l1(x: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Any:
    return aten.smooth_l1_loss.default(wide(x), wide(target), reduction, beta).to(torch.result_type(x, target))


def _smooth_l1_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> Any:
    """torch_xla gives a NaN the gradient of a large negative difference."""
    dtype = torch.promote_types(gradient.dtype, torch.result_type(x, target))
    gradient = wide(gradient)
    gradient = gradient / x.numel() if reduction == _MEAN else gradient
    difference = wide(x) - wide(target)
    near = gradient * (difference if beta == 0 else difference / beta)
    end = number(beta, difference)
    return torch.where(difference <= -end, -gradient, torch.where(difference >= end, gradient, near)).to(dtype)


LOSS_FORMS: dict[Any, Callable[..., Any]] = {
    aten.binary_cross_entropy_backward.default: _cross_entropy_backward,
    aten.smooth_l1_loss.default: _smooth_l1,
    aten.smooth_l1_loss_backward.default: _smooth_l1_backward,
}
