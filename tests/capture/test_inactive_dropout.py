"""Dropout that drops nothing is its operand: writes to one reach the other."""

import pytest
import torch
import torch.nn.functional as F

from tests.spine import DEVICES, assert_same, check_gradients_like_eager, compiled, on

OFF = {
    "evaluation": lambda x: F.dropout(x, 0.3, training=False),
    "p=0": lambda x: F.dropout(x, 0.0),
    "in place": lambda x: F.dropout(x, 0.3, False, True),
    "torch.dropout": lambda x: torch.dropout(x, 0.3, train=False),
    "dropout1d": lambda x: F.dropout1d(x, 0.3, training=False),
    "dropout2d": lambda x: F.dropout2d(x[None], 0.0)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=False),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=False),
}


@pytest.mark.quick(
    "evaluation-xla", "p=0-cpu", "in place-xla", "torch.dropout-cpu", "dropout1d-xla", "dropout2d-xla",
    "alpha_dropout-cpu", "feature_alpha_dropout-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OFF)
def test_a_write_to_the_result_reaches_the_operand(name, device):
    def fn(x):
        y = x * 2
        h = OFF[name](y)
        h.add_(1)
        return y + 0, h * 1

    x = torch.arange(24.0).view(2, 3, 4)
    assert_same(compiled(fn)(x.to(device)), fn(x))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"buckets": [8]}], ids=["exact", "buckets"])
def test_a_write_to_the_result_reaches_the_argument(options, device):
    def fn(x):
        h = F.dropout(x.view(4, 2), 0.1, training=False).t()
        h.mul_(2)
        return x.sum()

    x, other = on(device, torch.arange(8.0)), torch.arange(8.0)
    assert_same(compiled(fn, **options)(x), fn(other))
    assert_same(x, other)


def test_the_result_may_be_the_argument():
    x = torch.ones(3)
    result = compiled(lambda x: F.dropout(x, 0.5, training=False))(x)
    result.add_(1)
    assert_same(x, torch.full((3,), 2.0))


def test_a_view_made_without_gradients_stays():
    """Eager returns a view of an operand without batch."""

    def fn(x):
        with torch.no_grad():
            h = F.dropout1d(x, 0.5, training=False)
        return h * x

    check_gradients_like_eager(fn, torch.randn(4, 3, requires_grad=True))


def test_gradients_and_active_dropout():
    check_gradients_like_eager(lambda x: F.dropout(x * 2, 0.0).tanh(), torch.randn(4, 3, requires_grad=True))
    assert (compiled(lambda x: F.dropout(x, 0.5))(torch.ones(1000)) == 0).any()
