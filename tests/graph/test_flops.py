"""FLOPs of a graph, and the part of them in which a backward computes the forward again."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.graph.flops import model_flops, recomputed_flops
from kp_dynamo.graph.saved_values import partitioned
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from tests.graphs import applied, trace_inference, trace_joint

SIZE = 128  # a gate is for values of 16 KiB or more
MATMUL = 2 * SIZE**3


def two_matmuls(a, b):
    return ((a @ b).sin() @ b).cos()


def graphs_of_a_step(policy):
    """Forward and backward if the partitioner is told what to do with all values of the forward."""
    a, b = torch.randn(SIZE, SIZE, requires_grad=True), torch.randn(SIZE, SIZE)
    joint = trace_joint(two_matmuls, a, b)
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[:2]:
        node.meta |= {"recompute": policy, "ac_graph_id": 0}
    return partitioned(joint)


@pytest.mark.parametrize(
    ("policy", "recomputed"), [(CheckpointPolicy.MUST_SAVE, 0), (CheckpointPolicy.MUST_RECOMPUTE, 2 * MATMUL)]
)
def test_the_matmuls_that_depend_on_no_tangent_are_recomputed(policy, recomputed):
    forward, backward = graphs_of_a_step(policy)
    assert model_flops(forward.graph) == 2 * MATMUL
    assert recomputed_flops(forward.graph) == 0
    assert recomputed_flops(backward.graph) == recomputed
    assert model_flops(backward.graph) == 2 * MATMUL + recomputed  # `b` needs no gradient


def test_a_gate_makes_no_gradient_of_what_waits_for_one():
    _, backward = graphs_of_a_step(CheckpointPolicy.MUST_RECOMPUTE)
    assert applied(GateRecomputation(), backward).rewritten
    assert recomputed_flops(backward.graph) == 2 * MATMUL


def test_inference_recomputes_nothing():
    graph = trace_inference(two_matmuls, torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)).graph
    assert (model_flops(graph), recomputed_flops(graph)) == (2 * MATMUL, 0)


@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_each_gradient_of_a_grouped_convolution_costs_as_much_as_its_forward(kind, groups):
    layer = kind(16, 32, 3, padding=1, groups=groups, bias=False)
    weight = layer.weight.detach().requires_grad_()
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    joint = trace_joint(lambda x, weight: torch.func.functional_call(layer, {"weight": weight}, (x,)), x, weight)
    forward = 2 * (2 * 8 * 8) * (16 // groups * 32) * 3 * 3
    assert model_flops(joint.graph) == 3 * forward
