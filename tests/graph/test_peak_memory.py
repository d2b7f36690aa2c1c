"""The estimate of a program's memory from its graph: exact where it can be, and sensitive to what should lower it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kp_dynamo.graph.peak_memory import peak_memory
from kp_dynamo.graph.saved_values import num_forward_results, partitioned
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from kp_dynamo.passes.recompute_blocks import RecomputeBlocks
from tests.cross_entropies import BLOCK_BYTES, CLASSES, ROWS, joint, operands
from tests.graphs import trace_inference
from tests.passes.test_recompute_policies import gpt_joint

SIZE = 256 * 256 * 4


def square(seed=0):
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(seed))


def estimate(fn, *args, vmem_bytes=0, **how):
    return peak_memory(trace_inference(fn, *args).graph, vmem_bytes, **how)


def test_arguments_and_results_are_exact():
    found = estimate(lambda a, b, unused: (a @ b, a.t(), a[:2]), square(), square(), square())
    assert found.arguments == 2 * SIZE
    assert found.results == 2 * SIZE + 2 * 256 * 4


@pytest.mark.parametrize(
    ("fn", "buffers"),
    [
        (lambda a, b: (a @ b).relu().sum(), 0),  # fused into the sum
        (lambda a, b: (a @ b).t().reshape(-1).relu().sum(), 1),  # a copy in another order
        (lambda a, b: (a @ b @ b).sum(), 2),  # both products at once
        (lambda a, b: (a @ b @ b @ b).sum(), 2),  # the first has gone
        (lambda a, b: a.sin().exp().cos() + b, 0),
        (lambda a, b: F.softmax(a + b, -1) @ b, 2),  # what is reduced and read again, and what a product reads
        (lambda a, b: (torch.ones_like(a) + b).relu(), 0),
    ],
)
def test_temporaries_are_the_values_alive_together(fn, buffers):
    found = estimate(fn, square(), square(), narrow_matmuls=False)
    assert found.temporaries == buffers * SIZE


def test_only_matmuls_read_bfloat16():
    wide = estimate(lambda a, b: (a @ b @ b).sum(), square(), square(), narrow_matmuls=False)
    narrow = estimate(lambda a, b: (a @ b @ b).sum(), square(), square())
    assert narrow.temporaries == wide.temporaries - SIZE // 2


def test_half_of_the_vector_memory_holds_temporaries():
    found = estimate(lambda a, b: (a @ b @ b).sum(), square(), square(), vmem_bytes=2 * SIZE, narrow_matmuls=False)
    assert found.temporaries == SIZE


def test_gates_let_segments_run_one_after_the_other():
    temporaries = []
    for gated in (False, True):
        joint = gpt_joint(length=64, num_blocks=4)
        RecomputeBlocks()(joint)
        _, backward = partitioned(joint)
        if gated:
            GateRecomputation()(backward)
        temporaries.append(peak_memory(backward.graph, 0).temporaries)
    assert temporaries[1] <= temporaries[0]


def test_nothing_is_more_than_all_values_together():
    joint = gpt_joint(length=64)
    for graph in (g.graph for g in partitioned(joint)):
        found = peak_memory(graph, 0)
        assert found.total - found.code <= sum(node_bytes(n) for n in joint.graph.nodes if n.op != "output")


def test_code_size_follows_from_matmuls():
    assert estimate(lambda a: a.sin().exp().softmax(-1), square()).code == 0
    assert estimate(lambda a, b: a @ b, square(), square()).code == 3 * SIZE // 4
    large = torch.zeros(2048, 2048)
    assert estimate(lambda a, b: a @ b @ b, large, large).code == 2 * 3 << 18


def test_a_matmul_that_is_reduced_stays_wide():
    """A layer's gradient, of which its bias takes the sum, and products its narrow form."""

    def layer(a, b, is_reduced):
        wide = (a @ b).float() * 2
        narrow = wide.bfloat16()
        return narrow @ b, b @ narrow, *((wide.sum(0),) if is_reduced else ())

    a, b = square().bfloat16(), square().bfloat16()
    assert estimate(lambda a, b: layer(a, b, True), a, b).temporaries == SIZE
    assert estimate(lambda a, b: layer(a, b, False), a, b).temporaries == SIZE // 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_head_holds_two_blocks_of_logits_or_all(smoothing, is_kept):
    def loss(x, weight, bias, target):
        return F.cross_entropy(F.linear(x, weight), target, label_smoothing=smoothing)

    gm = joint(loss, *operands())
    kept_bytes = 2 * ROWS * CLASSES if is_kept else 0
    FuseLinearCrossEntropy(min_bytes=0, block_bytes=BLOCK_BYTES, kept_bytes=kept_bytes)(gm)
    CastBf16()(gm)
    assert peak_memory(gm.graph, 0).temporaries == 4 * ROWS * (CLASSES if is_kept else 2 * 128)


def test_a_joint_graph_returns_the_loss_and_then_gradients():
    assert num_forward_results(gpt_joint().graph) == 1
