"""Where in an image `grid_sample` reads: ATen's arithmetic, so that roundings and bounds are those of eager."""

from __future__ import annotations

import torch

ZEROS, BORDER, REFLECTION = range(3)


def unnormalized(grid: torch.Tensor, size: int, align_corners: bool) -> torch.Tensor:
    """From [-1, 1], which are the middles or the edges of the outer pixels, to pixels."""
    scaled = (grid + 1) * slope(size, align_corners)
    return scaled if align_corners else scaled - 0.5


def slope(size: int, align_corners: bool) -> float:
    """The derivative of `unnormalized`."""
    return (size - 1) / 2 if align_corners else size / 2


def inside(x: torch.Tensor, size: int, padding: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The place at which the padding lets a place outside of the image read, and its derivative."""
    if padding == ZEROS:
        return x, torch.ones_like(x)
    derivative = torch.ones_like(x)
    if padding == REFLECTION:
        x, derivative = _reflected(x, size, align_corners)
    last = float(size - 1)
    low = torch.where(x > 0, x, 0.0)  # also for a NaN
    clipped = torch.where(low > last, last, low)
    return clipped, torch.where((low != 0) & (clipped != last), derivative, 0.0)


def _reflected(x: torch.Tensor, size: int, align_corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    low, twice = (0.0, 2.0 * (size - 1)) if align_corners else (-0.5, 2.0 * size)
    if twice <= 0:
        return torch.zeros_like(x), torch.zeros_like(x)
    distance = x - low
    sign = torch.where(distance < 0, -1.0, 1.0).to(x.dtype)
    extra = distance.abs() - (distance.abs() / twice).trunc() * twice
    is_flipped = extra > twice - extra
    return torch.where(is_flipped, twice - extra, extra) + low, torch.where(is_flipped, -sign, sign)
