"""GateWeightGradients: where a backward waits for the weight gradients of a layer, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx

from kp_dynamo.graph.saved_values import partitioned
from kp_dynamo.passes import gate_weight_gradients
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from kp_dynamo.passes.gate_weight_gradients import GateWeightGradients
from kp_dynamo.passes.recompute_blocks import RecomputeBlocks
from tests.graphs import graph_text, trace_joint
from tests.passes.test_recompute_policies import gpt_joint

WAIT = torch.ops.kp.wait_for_all.default


@pytest.fixture
def small(monkeypatch):
    """Gates for weights of any size."""
    monkeypatch.setattr(gate_weight_gradients, "_MIN_BYTES", 1)


def residual(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = x + (x @ weight).sin()
    return x


def weights(number: int, width: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(width, width, generator=generator).requires_grad_() for _ in range(number)]


def backward_of(fn, *args: Tensor) -> fx.GraphModule:
    return partitioned(trace_joint(fn, *args))[1]


def gates(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=WAIT)


def test_a_layer_waits_for_the_weight_gradient_of_the_layer_behind_it(small):
    backward = backward_of(residual, *weights(3))
    assert GateWeightGradients()(backward).rewritten == 1
    backward.graph.lint()
    assert_expected_inline(
        graph_text(backward),
        """\
mm: f32[4, 4] = input
mm_1: f32[4, 4] = input
t: f32[4, 4] = input
t_1: f32[4, 4] = input
t_2: f32[4, 4] = input
t_3: f32[4, 4] = input
tangents_1: f32[4, 4] = input
cos: f32[4, 4] = aten.cos.default(mm_1)
mul: f32[4, 4] = aten.mul.Tensor(tangents_1, cos)
mm_2: f32[4, 4] = aten.mm.default(t, mul)
mm_3: f32[4, 4] = aten.mm.default(mul, t_1)
add_2: f32[4, 4] = aten.add.Tensor(tangents_1, mm_3)
cos_1: f32[4, 4] = aten.cos.default(mm)
wait_for_all_default = kp.wait_for_all.default([mm_2, add_2])
getitem: f32[4, 4] = <built-in function getitem>(wait_for_all_default, 0)
getitem_1: f32[4, 4] = <built-in function getitem>(wait_for_all_default, 1)
mul_1: f32[4, 4] = aten.mul.Tensor(getitem_1, cos_1)
mm_4: f32[4, 4] = aten.mm.default(t_2, mul_1)
mm_5: f32[4, 4] = aten.mm.default(mul_1, t_3)
add_3: f32[4, 4] = aten.add.Tensor(getitem_1, mm_5)
return (add_3, mm_4, getitem)""",
    )


def test_values_stay(small):
    args = weights(4)
    backward = backward_of(residual, *args)
    inputs = [torch.randn(node.meta["val"].shape) for node in backward.graph.find_nodes(op="placeholder")]
    before = backward(*inputs)
    assert GateWeightGradients()(backward).rewritten == 2
    backward.recompile()
    for found, wanted in zip(backward(*inputs), before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_second_run_finds_the_same_places(small):
    backward = backward_of(residual, *weights(4))
    GateWeightGradients()(backward)
    text = graph_text(backward)
    assert GateWeightGradients()(backward).rewritten == 0
    assert graph_text(backward) == text


def test_small_weights_are_not_waited_for():
    assert GateWeightGradients()(backward_of(residual, *weights(4))).rewritten == 0


def test_large_weights_are():
    with torch.device("meta"):
        args = [torch.empty(2048, 2048, requires_grad=True) for _ in range(3)]
    assert GateWeightGradients()(backward_of(residual, *args)).rewritten == 1


def skips(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    down = (x @ a).sin()
    inner = (down @ b).sin()
    return (inner @ c).sin() * down


def results_between(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    h = (x @ a).sin()
    return h.cos(), ((h @ b).sin() @ c).sin()


def two_gradients(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Both streams meet in every layer."""
    for weight in (a, b):
        x, y = (x @ weight).sin() * y, (y @ weight).cos() + x
    return x * y


@pytest.mark.parametrize(("fn", "number"), [(skips, 1), (results_between, 2), (two_gradients, 1)])
def test_places_where_several_gradients_pass_are_left_alone(small, fn, number):
    backward = backward_of(fn, *weights(4))
    assert GateWeightGradients()(backward).rewritten == number
    backward.graph.lint()


def test_a_gradient_waits_with_its_cast(small):
    def linear(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = x[None]
        x = x + x.sin() @ a
        return x + x.sin() @ b

    joint = trace_joint(linear, *weights(3, 8))
    for graph_pass in (CastBf16("matmul"), FoldViews(float32_in_one_pass=True)):
        graph_pass(joint)
    backward = partitioned(joint)[1]
    assert GateWeightGradients()(backward).rewritten > 0
    dtypes = [[n.meta["val"].dtype for n in gate.args[0]] for gate in gates(backward)]
    assert any(torch.bfloat16 in found and torch.float32 in found for found in dtypes)


@pytest.mark.quick("0.1")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gates_of_recomputation_and_of_gradients_make_no_circle(small, dropout):
    joint = gpt_joint(num_blocks=3, length=64, dropout=dropout)
    RecomputeBlocks()(joint)
    backward = partitioned(joint)[1]
    assert GateRecomputation()(backward).rewritten > 0
    assert GateWeightGradients()(backward).rewritten >= 3
    backward.graph.lint()


def test_convolutions_are_left_alone(small):
    generator = torch.Generator().manual_seed(0)
    kernels = [torch.randn(4, 4, 3, 3, generator=generator).requires_grad_() for _ in range(3)]

    def convolved(x: Tensor, *kernels: Tensor) -> Tensor:
        for kernel in kernels:
            x = x + F.conv2d(x, kernel, padding=1).sin()
        return x

    image = torch.randn(2, 4, 8, 8, generator=generator).requires_grad_()
    assert GateWeightGradients()(backward_of(convolved, image, *kernels)).rewritten == 0
