"""`grid_sample` of images, and its gradients, as gathers of pixels: torch_xla 2.9 has no lowering for it.

Legend: N images, C channels, H, W size of an image, P points of a grid (all rows of it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import wide
from kp_dynamo.lowering.grid_places import inside, slope, unnormalized

aten = torch.ops.aten

_BILINEAR, _NEAREST, _BICUBIC = range(3)


class _Pixels:
    """The pixels of images as rows [N * H * W, C], so that each read is of all channels."""

    def __init__(self, images: torch.Tensor, padding: int) -> None:
        self.num, self.channels, self.height, self.width = images.shape
        self.rows = images.permute(0, 2, 3, 1).reshape(-1, self.channels)
        self.padding = padding

    def places(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The row of each whole x, y [N, P], and whether it is in the image [N, P, 1]."""
        is_inside = (x > -1) & (x < self.width) & (y > -1) & (y < self.height)
        column, row = (torch.where(is_inside, place, 0.0).long() for place in (x, y))
        first = torch.arange(self.num, device=x.device).unsqueeze(1) * (self.height * self.width)
        return (first + row * self.width + column).reshape(-1), is_inside.unsqueeze(-1)

    def read(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The pixels at whole x, y [N, P], or zeros outside of the image -> [N, P, C]."""
        places, is_inside = self.places(x, y)
        read = self.rows.index_select(0, places).reshape(*x.shape, self.channels)
        return torch.where(is_inside, read, 0.0)


def _corners(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The four pixels around each point: their x, y, the weight of each, and its derivatives by x and by y."""
    left, top = x.floor(), y.floor()
    west, north = x - left, y - top
    for along_y, weight_y, sign_y in ((top, 1 - north, -1), (top + 1, north, 1)):
        for along_x, weight_x, sign_x in ((left, 1 - west, -1), (left + 1, west, 1)):
            weights = (weight_x * weight_y, sign_x * weight_y, sign_y * weight_x)
            yield along_x, along_y, *(weight.unsqueeze(-1) for weight in weights)


def _grid_sample(images: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    """[N, C, H, W], [N, h, w, 2] -> [N, C, h, w]."""
    _require_pixels(images)
    pixels = _Pixels(wide(images), padding)
    x, y = wide(grid).reshape(pixels.num, -1, 2).unbind(-1)
    sizes = ((x, pixels.width), (y, pixels.height))
    x, y = (unnormalized(place, size, align_corners) for place, size in sizes)
    if mode == _BICUBIC:
        sampled = _bicubic(pixels, x, y, align_corners)
    else:
        x, y = (inside(p, s, padding, align_corners)[0] for p, s in ((x, pixels.width), (y, pixels.height)))
        sampled = pixels.read(x.round(), y.round()) if mode == _NEAREST else _bilinear(pixels, x, y)
    return sampled.permute(0, 2, 1).reshape(*images.shape[:2], *grid.shape[1:3]).to(images.dtype)


def _bilinear(pixels: _Pixels, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, *others = (pixels.read(at_x, at_y) * weight for at_x, at_y, weight, *_ in _corners(x, y))
    return sum(others, first)


def _bicubic(pixels: _Pixels, x: torch.Tensor, y: torch.Tensor, align_corners: bool) -> torch.Tensor:
    left, top = x.floor(), y.floor()
    along_x = [inside(left + i, pixels.width, pixels.padding, align_corners)[0] for i in range(-1, 3)]
    along_y = [inside(top + i, pixels.height, pixels.padding, align_corners)[0] for i in range(-1, 3)]
    weights_x, weights_y = _cubic(x - left), _cubic(y - top)
    lines = [_weighted([pixels.read(at_x, at_y) for at_x in along_x], weights_x) for at_y in along_y]
    return _weighted(lines, weights_y)


def _cubic(t: torch.Tensor, a: float = -0.75) -> list[torch.Tensor]:
    """ATen's weights of four neighbours, of which the second is `t` before the point."""
    near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in (t, 1 - t)]
    far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in (t + 1, 2 - t)]
    return [weight.unsqueeze(-1) for weight in (far[0], near[0], near[1], far[1])]


def _weighted(values: list[torch.Tensor], weights: list[torch.Tensor]) -> torch.Tensor:
    first, *others = (value * weight for value, weight in zip(values, weights, strict=True))
    return sum(others, first)


def _grid_sample_backward(
    gradient: torch.Tensor,
    images: torch.Tensor,
    grid: torch.Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    wanted: list[bool],
) -> Any:
    """The gradients of the images and of the grid; ATen computes that of the grid always."""
    _require_pixels(images)
    if mode == _BICUBIC:
        raise NotImplementedError("the gradient of bicubic samples has no form")
    pixels = _Pixels(wide(images), padding)
    of_samples = wide(gradient).permute(0, 2, 3, 1).reshape(pixels.num, -1, pixels.channels)
    raw = wide(grid).reshape(pixels.num, -1, 2).unbind(-1)
    sizes = (pixels.width, pixels.height)
    found = [
        inside(unnormalized(place, size, align_corners), size, padding, align_corners)
        for place, size in zip(raw, sizes, strict=True)
    ]
    (x, slope_x), (y, slope_y) = found
    of_x, of_y = torch.zeros_like(x), torch.zeros_like(y)
    of_pixels = torch.zeros_like(pixels.rows)
    for at_x, at_y, weight, by_x, by_y in _read_places(mode, x, y):
        places, is_inside = pixels.places(at_x, at_y)
        if wanted[0]:
            given = torch.where(is_inside, of_samples * weight, 0.0)
            of_pixels = of_pixels.index_add(0, places, given.reshape(-1, pixels.channels))
        dots = (pixels.read(at_x, at_y) * of_samples).sum(-1, keepdim=True)
        of_x, of_y = of_x + (dots * by_x).squeeze(-1), of_y + (dots * by_y).squeeze(-1)
    of_x, of_y = of_x * (slope_x * slope(sizes[0], align_corners)), of_y * (slope_y * slope(sizes[1], align_corners))
    of_images = of_pixels.reshape(pixels.num, pixels.height, pixels.width, -1).permute(0, 3, 1, 2)
    of_grid = torch.stack((of_x, of_y), -1).reshape(grid.shape)
    return of_images.to(images.dtype) if wanted[0] else None, of_grid.to(grid.dtype)


def _read_places(mode: int, x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    if mode == _BILINEAR:
        yield from _corners(x, y)
    else:
        one, zero = x.new_ones(1), x.new_zeros(1)
        yield x.round(), y.round(), one, zero, zero


def _require_pixels(images: torch.Tensor) -> None:
    """Raise for images without pixels, which then run on the CPU, with ATen's error."""
    if images.numel() == 0:
        raise NotImplementedError("ATen refuses images without pixels")


GRID_FORMS: dict[Any, Callable[..., Any]] = {
    aten.grid_sampler_2d.default: _grid_sample,
    aten.grid_sampler_2d_backward.default: _grid_sample_backward,
}
