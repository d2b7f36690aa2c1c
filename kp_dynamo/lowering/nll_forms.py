"""The gradient of the negative log likelihood: torch_xla 2.9 multiplies by 0 where ATen writes 0.

A row whose target is ignored gets 0 in ATen, even if the gradient of its loss is NaN or infinite. So does every class
but the target.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import wide

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # values of `reduction`


def _backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total: torch.Tensor,
) -> torch.Tensor:
    """x: [N, C, ...], target: [N, ...]; the gradient is that of each target, or of the sum or mean."""
    by_class, is_counted = [-1] + [1] * (x.dim() - 2), target != ignore_index
    scale = -wide(gradient)
    if reduction == _NONE:
        scale = scale.unsqueeze(1)
    if reduction == _MEAN:  # the total of torch_xla's forward is another one
        scale = scale / _total(target, is_counted, weight).to(scale.dtype)
    if weight is not None:
        scale = scale * wide(weight).view(by_class)
    classes = torch.arange(x.shape[1], dtype=torch.int32, device=x.device).view(by_class)
    is_target = (target.to(torch.int32).unsqueeze(1) == classes) & is_counted.unsqueeze(1)
    return torch.where(is_target, scale, torch.zeros_like(scale)).to(x.dtype)


def _total(target: torch.Tensor, is_counted: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The weights of all targets that are not ignored."""
    if weight is None:
        return is_counted.sum()
    of_target = wide(weight).index_select(0, target.flatten().clamp(0, len(weight) - 1)).view(target.shape)
    return torch.where(is_counted, of_target, torch.zeros_like(of_target)).sum()


NLL_FORMS: dict[Any, Callable[..., Any]] = {
    aten.nll_loss_backward.default: _backward,
    aten.nll_loss2d_backward.default: _backward,
}
