"""How far a compiled model is from the eager one: values that are no finite floats count too."""

import math

import pytest
import torch
from torch import nn

from kp_dynamo.api.comparison import Difference, difference
from kp_dynamo.api.models import SampleInputs
from kp_dynamo.api.validation_rules import _judged

INF, NAN = math.inf, math.nan


class Returns(nn.Module):
    def __init__(self, *results):
        super().__init__()
        self.results = results

    def forward(self):
        return self.results


def apart(eager, compiled):
    return difference(Returns(torch.tensor(eager)), Returns(torch.tensor(compiled)), SampleInputs()).results


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
    assert difference(Returns(eager), Returns(compiled), SampleInputs()).results == pytest.approx(0.5)


def test_a_model_that_gives_nan_is_not_taken_for_random():
    masked = torch.tensor([0.0, NAN])
    assert not difference(Returns(masked), Returns(masked), SampleInputs()).is_random


@pytest.mark.parametrize("far", [Difference(0.0, NAN), Difference(NAN, 0.0), Difference(NAN, None), Difference(0.0, 1)])
def test_nan_does_not_pass(far):
    assert _judged(far, 0.1).status == "failed"
    assert _judged(Difference(0.05, None), 0.1).status == "passed"
