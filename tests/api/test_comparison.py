"""How far a compiled model is from the eager one: values that are no finite floats count too."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kp_dynamo.api.comparison import difference, milliseconds
from kp_dynamo.api.models import SampleInputs

INF, NAN = math.inf, math.nan


class Returns(nn.Module):
    def __init__(self, *results):
        super().__init__()
        self.results = results

    def forward(self):
        return self.results


def apart(eager, compiled):
    return difference(Returns(torch.tensor(eager)), Returns(torch.tensor(compiled)), SampleInputs())[0]


@pytest.mark.parametrize(
    ("eager", "compiled", "expected"),
    [
        ([1.0, -INF], [1.0, -INF], 0.0),
        ([3.0, NAN, INF], [3.0, NAN, INF], 0.0),
        ([4.0, -INF], [5.0, -INF], 0.25),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, NAN], [1.0, 1.0], INF),
        ([1.0, 1.0], [1.0, NAN], INF),
        ([1.0, 1.0], [1.0, INF], INF),
        ([1, 2], [1, 2], 0.0),
        ([1, 2**53], [1, 2**53 + 1], INF),
        ([True, False], [True, True], INF),
        ([1, 2], [1.0, 2.0], INF),
        ([3 + 4j], [3 + 5j], 0.2),
        ([3 + 4j], [3 + 4j], 0.0),
        ([complex(1, INF)], [complex(1, INF)], 0.0),
        ([complex(1, INF)], [complex(1, -INF)], INF),
    ],
)
def test_what_is_far_apart(eager, compiled, expected):
    assert apart(eager, compiled) == pytest.approx(expected)


def test_norms_that_overflow_are_not_taken_for_near():
    eager, compiled = torch.full((1,), 1e160, dtype=torch.float64), torch.full((1,), 1.5e160, dtype=torch.float64)
    assert difference(Returns(eager), Returns(compiled), SampleInputs())[0] == pytest.approx(0.5)


def test_a_model_that_gives_nan_is_not_taken_for_random():
    masked = torch.tensor([0.0, NAN])
    assert difference(Returns(masked), Returns(masked), SampleInputs()) == (0.0, 0.0)


def test_gradients_are_compared_and_random_models_are_not():
    eager, inputs = nn.Linear(4, 2), SampleInputs((torch.randn(3, 4),))
    assert difference(eager, eager, inputs) == (0.0, 0.0)
    results, gradients = difference(eager, lambda x: eager(x) + eager.weight.sum() * 0.5, inputs)
    assert results > 0
    assert gradients > 0
    noisy = nn.Sequential(eager, nn.Dropout(0.5))
    assert difference(noisy, noisy, inputs) is None


def test_every_run_gets_the_values_of_the_sample_inputs():
    x = torch.ones(3)
    doubling, inputs = Calls(lambda x: x.mul_(2)), SampleInputs((x,))
    assert difference(doubling, lambda x: x.mul_(3), inputs) == (0.5, 0.0)
    milliseconds(doubling, doubling, inputs)
    assert x.tolist() == [1, 1, 1]


class Calls(nn.Module):
    def __init__(self, function, *modules):
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, *args):
        return self.function(*self.inner, *args)


def test_gradients_of_a_reentrant_checkpoint_are_compared_and_none_is_left():
    linear, outer = nn.Linear(4, 4), nn.Linear(4, 4)
    model = Calls(lambda inner, last, x: last(checkpoint(inner, last(x), use_reentrant=True)), linear, outer)
    old, steps = torch.ones_like(linear.weight), []
    linear.weight.grad = old
    linear.weight.register_post_accumulate_grad_hook(steps.append)
    inputs = SampleInputs((torch.randn(3, 4),))
    assert difference(model, model, inputs) == (0.0, 0.0)
    _, gradients = difference(model, Calls(lambda inner, last, x: last(inner(last(x))) * 2, linear, outer), inputs)
    assert gradients == pytest.approx(1.0)
    assert linear.weight.grad is old
    assert outer.weight.grad is None
    assert steps == []
    linear(torch.ones(4)).sum().backward()
    assert len(steps) == 1
