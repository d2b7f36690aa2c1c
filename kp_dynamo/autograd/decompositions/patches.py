"""`F.unfold` and `F.fold` as slices, reshapes and permutations: torch 2.9 gathers and scatters single elements.

Shapes: N images, C channels, H x W pixels, a kernel of I x J, a grid of P x Q patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten

Pair = Sequence[int]
_MOST_SLICES = 64


def patch_decompositions(torchs: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The decompositions of `im2col` and `col2im`, which use torch's where slices are too many or a size varies."""
    return {
        aten.im2col.default: partial(_im2col, torchs[aten.im2col.default]),
        aten.col2im.default: partial(_col2im, torchs[aten.col2im.default]),
    }


def _im2col(torchs: Any, x: torch.Tensor, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Any:
    """[N, C, H, W] or [C, H, W] -> [N, C * I * J, P * Q], or without N."""
    grid = _grid(x.shape[-2:], kernel, dilation, padding, stride)
    if not _is_static(x) or 0 in x.shape or min(grid) < 1 or min(stride) < 1:
        return torchs(x, kernel, dilation, padding, stride)
    tiled = _is_tiled(kernel, dilation, stride)
    if not tiled and math.prod(kernel) > _MOST_SLICES:
        return torchs(x, kernel, dilation, padding, stride)
    images = x if x.dim() == 4 else x.unsqueeze(0)
    images = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    patches = (_tiles if tiled else _slices)(images, kernel, dilation, stride, grid)
    patches = patches.reshape(*images.shape[:1], images.shape[1] * math.prod(kernel), math.prod(grid))
    return patches if x.dim() == 4 else patches.squeeze(0)


def _tiles(images: torch.Tensor, kernel: Pair, dilation: Pair, stride: Pair, grid: Pair) -> torch.Tensor:
    """[N, C, H, W] -> [N, C, I, J, P, Q] of patches that touch and do not overlap."""
    n, c = images.shape[:2]
    cut = images[:, :, : grid[0] * kernel[0], : grid[1] * kernel[1]]
    return cut.reshape(n, c, grid[0], kernel[0], grid[1], kernel[1]).permute(0, 1, 3, 5, 2, 4)


def _slices(images: torch.Tensor, kernel: Pair, dilation: Pair, stride: Pair, grid: Pair) -> torch.Tensor:
    """[N, C, H, W] -> [N, C, I * J, P, Q]: the pixels at one place of all patches are a slice."""

    def sliced(x: torch.Tensor, dim: int, place: int) -> torch.Tensor:
        start = place * dilation[dim]
        return aten.slice(x, 2 + dim, start, start + (grid[dim] - 1) * stride[dim] + 1, stride[dim])  # type: ignore[no-any-return]

    rows = [sliced(images, 0, i) for i in range(kernel[0])]
    return torch.stack([sliced(row, 1, j) for row in rows for j in range(kernel[1])], 2)


def _col2im(torchs: Any, x: torch.Tensor, size: Pair, kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Any:
    """[N, C * I * J, P * Q] -> [N, C, H, W], or both without N; overlapping pixels are added."""
    if not (_is_static(x) and all(isinstance(s, int) for s in size) and _is_tiled(kernel, dilation, stride)):
        return torchs(x, size, kernel, dilation, padding, stride)
    grid = _grid(size, kernel, dilation, padding, stride)
    if 0 in x.shape or min(grid) < 1 or math.prod(grid) != x.shape[-1] or x.shape[-2] % math.prod(kernel):
        return torchs(x, size, kernel, dilation, padding, stride)  # which says what is wrong
    batched = x if x.dim() == 3 else x.unsqueeze(0)
    n, c = batched.shape[0], batched.shape[1] // math.prod(kernel)
    tiles = batched.reshape(n, c, *kernel, *grid).permute(0, 1, 4, 2, 5, 3)
    images = tiles.reshape(n, c, grid[0] * kernel[0], grid[1] * kernel[1])
    right, below = (size[d] + padding[d] - grid[d] * kernel[d] for d in (1, 0))
    images = F.pad(images, (-padding[1], right, -padding[0], below))
    return images if x.dim() == 3 else images.squeeze(0)


def _grid(size: Sequence[Any], kernel: Pair, dilation: Pair, padding: Pair, stride: Pair) -> tuple[Any, Any]:
    """The number of patches in each direction."""
    found = [(size[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // max(stride[d], 1) + 1 for d in range(2)]
    return found[0], found[1]


def _is_tiled(kernel: Pair, dilation: Pair, stride: Pair) -> bool:
    return tuple(kernel) == tuple(stride) and tuple(dilation) == (1, 1)


def _is_static(x: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in x.shape)
