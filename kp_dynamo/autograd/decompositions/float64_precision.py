"""Full float64 precision: torch_xla 2.9 writes the constants of some operators as float32, for every dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten


@functools.cache
def float64_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of these operators for float64 tensors; other dtypes keep torch_xla's lowering."""
    return {
        aten.log2.default: partial(_logarithm, 2.0),
        aten.log10.default: partial(_logarithm, 10.0),
        aten.affine_grid_generator.default: _for_float64(_affine_grid),
    }


def _logarithm(base: float, x: torch.Tensor) -> Any:
    """An exact integer for powers of the base, as in eager."""
    if not x.is_floating_point() and not x.is_complex():
        x = x.to(torch.get_default_dtype())
    if x.dtype != torch.float64:
        return NotImplemented
    found = x.log() / math.log(base)
    whole = found.round()
    return torch.where(torch.pow(base, whole) == x, whole, found)


def _affine_grid(theta: torch.Tensor, size: list[int], align_corners: bool) -> torch.Tensor:
    """`F.affine_grid`: positions times theta, x first. They span -1 to 1, or the centers of the outer pixels.

    Args:
        theta: [N, 2, 3] or [N, 3, 4].
        size: [N, C, H, W] or [N, C, D, H, W].
        align_corners: Whether -1 and 1 are the centers of pixels.
    """
    batch, _, *spatial = size
    axes = []
    for dim, steps in enumerate(spatial):
        axis = torch.linspace(-1, 1, steps, dtype=theta.dtype) if steps > 1 else theta.new_zeros(steps)
        axes.append(
            (axis if align_corners else axis * ((steps - 1) / steps)).view([-1] + [1] * (len(spatial) - 1 - dim))
        )
    places = torch.broadcast_tensors(*axes[::-1], theta.new_ones(spatial))
    grid = torch.stack(places, -1).view(1, -1, len(spatial) + 1) @ theta.mT
    return grid.view(batch, *spatial, len(spatial))


def _for_float64(form: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return form(x, *args, **kwargs) if x.dtype == torch.float64 else NotImplemented

    return chosen
