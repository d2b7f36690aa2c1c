"""Full float64 precision: torch_xla 2.9 writes the constants of some operators as float32, for every dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


@functools.cache
def float64_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of these operators for float64 tensors; other dtypes keep torch_xla's lowering."""
    forms: dict[Any, Callable[..., Any]] = {
        aten.log2.default: lambda x: x.log() / math.log(2),
        aten.log10.default: lambda x: x.log() / math.log(10),
        aten.affine_grid_generator.default: _affine_grid,
    }
    return {op: _for_float64(form) for op, form in forms.items()}


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
