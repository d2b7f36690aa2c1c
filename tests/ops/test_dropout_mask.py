"""The mask of attention's dropout: as random as it has to be, and the same wherever it is computed.

Bounds are five standard deviations, unless said: a right mask fails one test in a million seeds, and seeds are fixed.
"""

import math

import pytest
import torch
import torch_xla
from torch import Tensor

from kp_dynamo.ops.dropout_mask import KEY_SIZE, Dropout

N, S, T = 8, 256, 512


def key(seed: int = 0) -> Tensor:
    return torch.rand(KEY_SIZE, generator=torch.Generator().manual_seed(seed))


def standardized(rate: float, seed: int = 0) -> Tensor:
    """The mask with mean 0 and variance 1."""
    return (Dropout(key(seed), rate).kept(N, 0, S, T).double() - (1 - rate)) / math.sqrt(rate * (1 - rate))


def deviations(x: Tensor) -> Tensor:
    """How many standard deviations the mean of independent numbers of variance 1 lies from 0."""
    return x.mean().abs() * math.sqrt(x.numel())


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_the_rate_is_that_asked_for_in_all_rows_keys_and_heads(rate, seed):
    mask = standardized(rate, seed)
    assert deviations(mask) < 5
    for dims in ([2], [1], [0], [1, 2], [0, 2], [0, 1]):
        count = math.prod(mask.shape[d] for d in dims)
        sums = mask.sum(dims) / math.sqrt(count)
        # The variance of a sum of independent numbers; its own deviation is sqrt(2 / n), more for a rare event.
        kurtosis = 1 / (rate * (1 - rate)) / count
        assert abs(sums.square().mean() - 1) < 5 * math.sqrt((2 + kurtosis) / sums.numel())


@pytest.mark.quick("0.5")
@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize(
    "shift", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 1, -1), (0, 0, 256), (0, 128, 0), (1, 1, 1)]
)
def test_neighbours_are_independent(rate, shift):
    mask = standardized(rate)
    moved = mask.roll(shift, (0, 1, 2))
    assert deviations(mask * moved) < 5


def test_no_two_rows_are_alike():
    rows = standardized(0.5).view(N * S, T).float()
    products = (rows @ rows.T) / math.sqrt(T)
    products.fill_diagonal_(0)
    # The largest of two million normal numbers is about 5.1.
    assert products.abs().max() < 7
    assert abs(products.square().sum() / (N * S) / (N * S - 1) - 1) < 0.02


@pytest.mark.parametrize("number", range(KEY_SIZE))
def test_the_smallest_change_of_a_key_gives_another_mask(number):
    other = key()
    other[number] += 2.0**-24
    first, second = (Dropout(k, 0.5).kept(N, 0, S, T) for k in (key(), other))
    assert deviations((first.double() - 0.5) * (second.double() - 0.5) * 4) < 5


def test_a_block_is_a_part_of_the_whole():
    dropout = Dropout(key(), 0.3)
    assert torch.equal(dropout.kept(N, 100, 50, 200), dropout.kept(N, 0, S, T)[:, 100:150, :200])


def test_xla_has_the_mask_of_the_cpu():
    on_xla = Dropout(key().to(torch_xla.device()), 0.3).kept(N, 0, S, T)
    assert torch.equal(on_xla.cpu(), Dropout(key(), 0.3).kept(N, 0, S, T))


@pytest.mark.parametrize(("rate", "share"), [(0.0, 1.0), (1 - 2.0**-40, 0.0)])
def test_the_ends_of_the_range(rate, share):
    assert Dropout(key(), rate).kept(N, 0, S, T).double().mean() == share
