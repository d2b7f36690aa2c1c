"""Losses of one sample, computed as a batch of one: torch_xla 2.9 aborts the process on a 1-d input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_NONE = 0  # reduction="none"


def unbatched_loss_decompositions() -> dict[Any, Callable[..., Any]]:
    """For inputs [C]; those of batches [N, C] are not decomposed."""
    return {aten.nll_loss_forward.default: _nll_loss, aten.nll_loss_backward.default: _nll_loss_backward}


def _nll_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: Any
) -> Any:
    """x: [C], target: [] -> the loss [], and the weight of the target."""
    if x.dim() != 1:
        return NotImplemented
    loss, total = aten.nll_loss_forward(x.unsqueeze(0), target.reshape(1), weight, reduction, ignore_index)
    return loss.reshape(()), total


def _nll_loss_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: Any,
    total: torch.Tensor,
) -> Any:
    if x.dim() != 1:
        return NotImplemented
    gradient = gradient.reshape(1) if reduction == _NONE else gradient
    batch = x.unsqueeze(0), target.reshape(1)
    return aten.nll_loss_backward(gradient, *batch, weight, reduction, ignore_index, total).squeeze(0)
