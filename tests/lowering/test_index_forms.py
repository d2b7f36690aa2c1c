"""Indices with whole dimensions between them, of slices: torch_xla reads the memory that the slice was cut from."""

from __future__ import annotations

import pytest
import torch

from tests.spine import check_gradients_like_eager, check_like_eager

INDICES = torch.tensor([0, 1, 2]), torch.tensor([3, 1, 2]), torch.tensor([0, 1, 0])
X, Y = torch.arange(60.0).reshape(3, 4, 5) / 60, torch.arange(240.0).reshape(3, 4, 5, 4) / 240


@pytest.mark.parametrize(
    "read",
    [
        lambda x, y, a, b, c: (x[a, 1:3, b], x[a, :2, b], x[a, ::2, b], x[a, None, 1:, b]),
        lambda x, y, a, b, c: (x[:, 1:][a, :, b], x[1:][a % 2, :, b], x.narrow(1, 1, 2)[a, :, b], x[..., 1:][a, :, b]),
        lambda x, y, a, b, c: ((x + 1)[a, 1:, b], torch.cat([x, x], 1)[a, 1:, b], x[:, :1].expand(3, 4, 5)[a, :, b]),
        lambda x, y, a, b, c: (x.transpose(0, 1)[1:][a, :, b], x.permute(2, 1, 0)[a, 1:, a], x[a.int(), 1:, b]),
        lambda x, y, a, b, c: (y[:, a, 1:, b], y[a, 1:, 1:, b], y[a, 1:, b, a], y[a, :, b, 1:], y[:, 1:, a][:, :, c]),
        lambda x, y, a, b, c: (x[torch.stack([a, c])[1:], 1:, b[None]], x[-a, 1:, -b], x[a, 1:, 2]),
        lambda x, y, a, b, c: (
            x[1:, a, b],
            x[1:, 1:][:, a],
            x[1:, :, 1:][..., a],
            y[1:, a, b, 1:],
            y[:, 1:][:, a, :, b],
        ),
    ],
)
def test_separated_indices_read_a_slice(read):
    check_like_eager(read, X, Y, *INDICES)


@pytest.mark.parametrize("read", [lambda x, a, b, c: x[a, 1:3, b], lambda x, a, b, c: x[:, 1:][c, :, c].exp()])
def test_gradients_of_separated_indices(read):
    check_gradients_like_eager(read, X.clone().requires_grad_(), *INDICES)


def test_a_slice_is_written_through_separated_indices():
    def written(x, a, b, c):
        part = x[:, 1:3]
        part[a, :, b] = part[a, :, b] + 10
        x[c, 1:3, b] *= 2
        return x

    check_like_eager(lambda x, *indices: written(x.clone(), *indices), X, *INDICES)
    check_like_eager(lambda x, *indices: written(x, *indices) + 1, X, *INDICES)
