"""Sliding windows on the device: `Tensor.unfold`, `F.unfold` and `F.fold`, and their gradients."""

import pytest
import torch
import torch.nn.functional as F

from tests.spine import check_gradients_like_eager, check_like_eager, compiled

X = torch.arange(2 * 13 * 3, dtype=torch.float32).reshape(2, 13, 3).cos()
WINDOWS = [(1, 1), (3, 1), (3, 2), (4, 2), (2, 4), (2, 5), (6, 4), (13, 1), (12, 7)]


@pytest.mark.quick("3-2", "2-5", "6-4")
@pytest.mark.parametrize(("size", "step"), WINDOWS)
def test_of_a_middle_dimension(size, step):
    check_like_eager(lambda x: x.unfold(1, size, step) * 1, X, strict=True)
    check_gradients_like_eager(lambda x: x.unfold(-2, size, step) * 1, X.clone().requires_grad_(), strict=True)


def test_windows_of_nothing():
    found = compiled(lambda x: (x.unfold(1, 0, 2) * 1, x[:0].unfold(1, 3, 2) * 1), strict=True)(X)
    assert [y.shape for y in found] == [(2, 7, 3, 0), (0, 6, 3, 3)]


def test_more_slices_than_are_traced():
    x = torch.randn(2, 300)
    check_like_eager(lambda x: x.unfold(1, 101, 50) * 2, x, strict=True)
    check_gradients_like_eager(lambda x: x.unfold(1, 101, 50) * 2, x.requires_grad_(), strict=True)


@pytest.mark.quick("dtype1", "dtype2", "dtype4")
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes_and_numbers_without_dimensions(dtype):
    x = X.to(dtype)
    check_like_eager(lambda x: (x.unfold(1, 4, 3).clone(), x[0, 0, 0].unfold(0, 1, 1).clone()), x, strict=True)


def test_windows_of_windows_of_views_and_of_inputs():
    check_like_eager(lambda x: x.mT.unfold(2, 4, 2).unfold(1, 2, 1) * 1, X, strict=True)
    check_like_eager(lambda x: x[:, ::2].unfold(1, 3, 2) + x.flip(1)[:, :7].unfold(1, 3, 2), X, strict=True)
    check_like_eager(lambda x: x.unfold(1, 5, 5), X)


IMAGES = [
    dict(kernel_size=3),
    dict(kernel_size=(2, 3), padding=1, stride=2),
    dict(kernel_size=(2, 2), dilation=(1, 2), padding=(0, 1), stride=(1, 2)),
    dict(kernel_size=(2, 3), stride=(2, 3)),
    dict(kernel_size=(3, 4), stride=(3, 4), padding=(1, 2)),
]


@pytest.mark.quick(
    "{'kernel_size': (2, 2), 'dilation': (1, 2), 'padding': (0, 1), 'stride': (1, 2)}",
    "{'kernel_size': (2, 3), 'stride': (2, 3)}",
)  # fmt: skip
@pytest.mark.parametrize("how", IMAGES, ids=str)
def test_patches_of_images(how):
    x = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    check_like_eager(lambda x: (F.unfold(x, **how), F.unfold(x[0], **how)), x, strict=True)
    check_gradients_like_eager(lambda x: F.unfold(x, **how), x.clone().requires_grad_(), strict=True)
    patches = F.unfold(x, **how)
    check_like_eager(lambda p: (F.fold(p, (6, 8), **how), F.fold(p[0], (6, 8), **how)), patches, strict=True)
    check_gradients_like_eager(lambda p: F.fold(p, (6, 8), **how), patches.clone().requires_grad_(), strict=True)


def test_other_lengths_at_later_calls():
    run = compiled(lambda x: x.unfold(-1, 4, 2).sum(-1), dynamic=True, strict=True)
    for length in (9, 12, 5):
        x = torch.randn(3, length)
        torch.testing.assert_close(run(x), x.unfold(-1, 4, 2).sum(-1))
