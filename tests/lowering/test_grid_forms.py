"""`grid_sample` on the device: eager's samples and gradients, also on and beyond the edges."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.spine import check_gradients_like_eager, check_like_eager

IMAGES = torch.arange(2 * 3 * 5 * 7.0).reshape(2, 3, 5, 7).cos()
EDGES = torch.tensor([-1.0, -1 + 1 / 7, 0.0, 1 - 1 / 5, 1.0, -3.0, 5.0, 1 / 7])
AT_EDGES = torch.cartesian_prod(EDGES, EDGES).expand(2, -1, -1)
POINTS = torch.cat((torch.linspace(-2.3, 2.1, 2 * 24 * 2).roll(5).reshape(2, 24, 2), AT_EDGES), 1).reshape(2, 11, 8, 2)
PADDINGS = ("zeros", "border", "reflection")
QUICK = {("bilinear", "zeros", False), ("bilinear", "reflection", True), ("nearest", "border", False)}
CASES = [
    pytest.param(mode, padding, align, marks=[] if (mode, padding, align) in QUICK else [pytest.mark.slow])
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in PADDINGS
    for align in (False, True)
]


@pytest.mark.parametrize(("mode", "padding", "align"), CASES)
def test_samples_and_gradients(mode, padding, align):
    def samples(images, grid):
        return F.grid_sample(images, grid, mode, padding, align)

    check_like_eager(samples, IMAGES, POINTS, strict=True)
    if mode != "bicubic":
        check_gradients_like_eager(
            samples, IMAGES.clone().requires_grad_(), POINTS.clone().requires_grad_(), strict=True
        )


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_points_that_are_not_numbers(mode):
    grid = POINTS.clone()
    grid[0, 0, 0, 0], grid[0, 1, 1, 1] = math.nan, math.nan
    check_like_eager(lambda x, g: [F.grid_sample(x, g, mode, p, False) for p in PADDINGS], IMAGES, grid, strict=True)


def test_one_pixel():
    def samples(images, grid):
        return [F.grid_sample(images, grid, padding_mode=p, align_corners=a) for p in PADDINGS for a in (False, True)]

    check_like_eager(samples, IMAGES[:, :, :1, :1], POINTS, strict=True)


def test_only_the_gradient_of_the_images():
    wide = IMAGES.double().requires_grad_()
    check_gradients_like_eager(lambda x, g: F.grid_sample(x, g, align_corners=True), wide, POINTS.double(), strict=True)
