"""Errors and bounds, as numbers."""

import math

import pytest
import torch
from torch import fx

from kp_dynamo.ledger.bounds import bounds
from kp_dynamo.ledger.float64 import call_in_float64
from kp_dynamo.ledger.real_inputs import NotComparable, graph_inputs
from kp_dynamo.ledger.relative_errors import relative_error
from kp_dynamo.passes.base import Errors, PassErrors

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("values", "reference", "expected"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([3.0, 4.0], [0.0, 0.0], 5.0),  # the norm itself, if the reference is zero
        ([INF, NAN, 4.4], [INF, NAN, 4.0], 0.1),  # equal infinities and NaN do not count
        ([INF, 4.0], [3.0, 4.0], INF),
        ([NAN, 4.0], [3.0, 4.0], INF),
        ([-INF, 4.0], [INF, 4.0], INF),
        ([3.0, 4.0], [INF, 4.0], INF),
    ],
)
def test_error_of_one_tensor(values, reference, expected):
    assert relative_error([torch.tensor(values)], [torch.tensor(reference)]) == pytest.approx(expected, rel=1e-6)


def test_tensors_count_together_and_integers_do_not():
    a, b = torch.tensor([3.0]), torch.tensor([4.0])
    assert relative_error([a, torch.tensor(7), b, None], [a, torch.tensor(8), b + 1, None]) > 0
    assert relative_error([torch.tensor(7), None], [torch.tensor(8), None]) is None
    assert relative_error([a * 1j, b], [a * 1j, b]) == 0
    assert relative_error([torch.ones(2)], [torch.ones(3)]) == INF
    assert relative_error([None], [a]) == INF  # a gradient that is missing
    assert relative_error([torch.ones(0)], [torch.ones(0)]) == 0


def test_bounds_grow_for_few_numbers():
    of_float32 = bounds(Errors(1e-7, 1e-7), (1, 10**6), 2**-24)
    assert of_float32 == Errors(1e-5, 1e-5)
    of_bfloat16 = bounds(Errors(3e-3, 3e-3), (1, 10**6), 2**-8)
    assert of_bfloat16.results == pytest.approx(3.3e-3 + 3e-3 + 2**-8)
    assert of_bfloat16.gradients == pytest.approx(3.3e-3, rel=3e-3)
    assert bounds(Errors(1e-7), (1, 0), 2**-24).gradients is None


def test_errors_compare_each_kind():
    bound = Errors(1e-5, None)
    assert Errors(2e-5).exceed(bound)
    assert not Errors(1e-6, 1.0).exceed(bound)
    assert not Errors().exceed(bound)
    assert Errors(INF).exceed(bound)
    assert Errors(1.0, None).at_least(Errors(2.0, 3.0)) == Errors(2.0, 3.0)
    assert PassErrors.from_dict({"before": {}, "exact": {"results": 1.0}, "bound": {}, "reason": "x"}) == PassErrors(
        exact=Errors(1.0), reason="x"
    )


def test_float64_replaces_casts():
    x = torch.full((2,), 1 + 2.0**-20)
    copied = call_in_float64(torch.ops.aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
    assert copied.dtype == torch.float64
    assert torch.equal(copied, x.double())
    scores = call_in_float64(torch.ops.aten._softmax.default, (x.bfloat16(), 0, True), {})
    assert scores.dtype == torch.float64
    with pytest.raises(NotComparable, match="reads the bits of a number"):
        call_in_float64(torch.ops.aten.view.dtype, (x, torch.int32), {})


def test_values_that_are_not_the_inputs_of_the_graph():
    graph = fx.Graph()
    graph.placeholder("primals_1").meta["val"] = torch.empty(3, device="meta")
    with pytest.raises(NotComparable, match="inputs that share memory are one input of the graph"):
        graph_inputs(graph, [])
    with pytest.raises(NotComparable, match="primals_1 of the graph is no argument of the call"):
        graph_inputs(graph, [torch.ones(4)])
    graph.placeholder("tangents_1").meta["val"] = torch.empty(3, device="meta")
    first, again = (graph_inputs(graph, [torch.ones(3)])[1] for _ in range(2))
    assert torch.equal(first, again)
