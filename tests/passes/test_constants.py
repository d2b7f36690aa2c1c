"""The one reader of constants: the number that a node is full of, as its dtype holds it, and factors made of one."""

import math

import pytest
import torch
from torch import Tensor, fx

from kp_dynamo.passes.constants.values import Constant, constant_of, factor_of
from tests.graphs import trace_inference

aten = torch.ops.aten
X = torch.ones(2, 3)


def node_of(fn, target, *args: Tensor) -> fx.Node:
    return next(n for n in trace_inference(fn, *(args or (X,))).graph.nodes if n.target is target)


@pytest.mark.parametrize(
    ("number", "dtype", "held"),
    [
        (2.7, torch.int64, 2),
        (-2.7, torch.int8, -2),
        (300, torch.bool, True),
        (0.1, torch.bfloat16, 0.10009765625),
        (0.1, torch.float64, 0.1),
        (-math.inf, torch.float16, -math.inf),
        (2, torch.complex64, 2 + 0j),
        (2**24 + 1, torch.float32, 2.0**24),
    ],
)
def test_a_number_is_what_its_dtype_holds(number, dtype, held):
    made = node_of(lambda x: (torch.full((2,), number, dtype=dtype), x + 1), aten.full.default)
    assert constant_of(made) == Constant(held, dtype)
    assert type(constant_of(made).value) is type(held)


def test_a_python_number_has_no_dtype():
    assert constant_of(2) == Constant(2, None)
    assert constant_of(True).value is True
    assert constant_of("2") is None
    assert constant_of(None) is None


def test_what_is_no_creation_is_no_constant():
    assert constant_of(node_of(lambda x: x * 2, aten.mul.Tensor)) is None
    assert constant_of(node_of(lambda x: torch.arange(3) + x, aten.arange.default)) is None


def test_creations_that_name_no_number():
    assert constant_of(node_of(lambda x: torch.zeros_like(x) + x, aten.zeros_like.default)) == Constant(0.0, X.dtype)
    assert constant_of(
        node_of(lambda x: x.new_ones(2, dtype=torch.int32).sum() + x, aten.new_ones.default)
    ) == Constant(1, torch.int32)


def test_a_cast_of_a_number_is_that_of_a_tensor():
    assert Constant(-1e9, None).as_float(torch.float16) == -math.inf
    assert Constant(257, torch.int64).as_float(torch.bfloat16) == 256.0
    assert Constant(True, None).as_float(torch.float32) == 1.0


FACTORS = {
    "literal": (lambda x: x * 2.5, aten.mul.Tensor, 2.5),
    "quotient": (lambda x: x / 4, aten.div.Tensor, 0.25),
    "integer": (lambda x: x * torch.full((), 2.7, dtype=torch.int64), aten.mul.Tensor, 2.0),
    "of every element": (lambda x: x * torch.full((2, 3), 2.0), aten.mul.Tensor, 2.0),
    "repeats": (lambda x: x[:1] * torch.full((2, 3), 2.0), aten.mul.Tensor, None),
    "zero": (lambda x: x * 0.0, aten.mul.Tensor, None),
    "infinite": (lambda x: x / math.inf, aten.div.Tensor, None),
    "complex": (lambda x: x * 2j, aten.mul.Tensor, None),
    "rounded": (lambda x: torch.div(x, 4, rounding_mode="floor"), aten.div.Tensor_mode, None),
}


@pytest.mark.parametrize("case", FACTORS)
def test_factors(case):
    fn, target, expected = FACTORS[case]
    assert factor_of(node_of(fn, target)) == expected
