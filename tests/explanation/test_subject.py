"""What a report is of, in the words of the model's signature."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kp_dynamo.explanation.subject import Subject

X, IDS = torch.zeros(2, 3), torch.zeros(4, dtype=torch.long)


class Model(nn.Module):
    def forward(self, input_ids, *others, mask=None):
        return input_ids


def double(x):
    return 2 * x


@pytest.mark.parametrize(
    ("model", "args", "kwargs", "expected"),
    [
        (Model(), (IDS,), {"mask": X}, ("Model", ("input_ids: int64[4]", "mask: float32[2, 3]"))),
        (Model(), (IDS, X, 3), {}, ("Model", ("input_ids: int64[4]", "others[0]: float32[2, 3]"))),
        (double, ({"a": [X]},), {}, ("double", ("x['a'][0]: float32[2, 3]",))),
        (torch.sin, (X,), {}, ("sin", ("argument 0: float32[2, 3]",))),
    ],
)
def test_the_model_and_its_tensors_are_named(model, args, kwargs, expected):
    found = Subject.of_call(model, args, kwargs)
    assert (found.model, found.inputs) == expected


def test_many_inputs_are_counted_and_what_is_unknown_is_left_out():
    found = Subject("Model", tuple(f"x{i}: float32[2]" for i in range(6)))
    assert found.facts("2026-03-01") == (
        "Model",
        "x0: float32[2], x1: float32[2], x2: float32[2], x3: float32[2], and 2 more",
        "2026-03-01",
    )
    assert Subject().facts("") == ()
