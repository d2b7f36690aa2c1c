"""GatherWeights: which weights and gradients are gathered, at which dtype, and what is never saved."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.graph.nodes import calls
from kp_dynamo.graph.op_tables import CROSS_ENTROPIES
from kp_dynamo.graph.saved_values import num_forward_results, partitioned
from kp_dynamo.graph.weight_matmuls import DividedWeight
from kp_dynamo.hardware import Spread
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fold_casts import FoldCasts
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from kp_dynamo.passes.gather_weights import GatherWeights
from kp_dynamo.passes.recompute_casts import RecomputeCasts
from kp_dynamo.pipeline import build_pipeline
from tests.cross_entropies import joint
from tests.graphs import applied, graph_text, trace_inference, trace_joint

GATHERED = torch.ops.kp.gathered.default


def weights(*positions):
    return tuple(DividedWeight(position) for position in positions)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_weights_are_gathered_in_bfloat16_and_gradients_where_their_matmul_is():
    def fn(x, w):
        return F.linear(F.relu(x), w).tanh()

    gm = trace_joint(fn, leaf(6, 4), leaf(8, 4))
    for graph_pass in (CastBf16("matmul", (), (1,)), RecomputeCasts()):
        applied(graph_pass, gm)
    assert applied(GatherWeights(weights(1)), gm).rewritten == 2
    assert_expected_inline(
        graph_text(gm),
        """\
primals_1: f32[6, 4] = input
primals_2: f32[8, 4] = input
tangents_1: f32[6, 8] = input
relu: f32[6, 4] = aten.relu.default(primals_1)
detach: f32[6, 4] = aten.detach.default(relu)
detach_1: f32[6, 4] = aten.detach.default(detach)
_to_copy_default: bf16[6, 4] = aten._to_copy.default(relu, dtype=torch.bfloat16)
_to_copy_default_1: bf16[8, 4] = aten._to_copy.default(primals_2, dtype=torch.bfloat16)
gathered_default: bf16[8, 4] = kp.gathered.default(_to_copy_default_1)
t_default: bf16[4, 8] = aten.t.default(gathered_default)
mm: bf16[6, 8] = aten.mm.default(_to_copy_default, t_default)
_to_copy_default_2: f32[6, 8] = aten._to_copy.default(mm, dtype=torch.float32)
tanh: f32[6, 8] = aten.tanh.default(_to_copy_default_2)
detach_2: f32[6, 8] = aten.detach.default(tanh)
detach_3: f32[6, 8] = aten.detach.default(detach_2)
detach_4: f32[6, 8] = aten.detach.default(detach_3)
detach_5: f32[6, 8] = aten.detach.default(detach_4)
tanh_backward: f32[6, 8] = aten.tanh_backward.default(tangents_1, detach_5)
_to_copy_default_3: bf16[6, 8] = aten._to_copy.default(tanh_backward, dtype=torch.bfloat16)
t_default_1: bf16[8, 6] = aten.t.default(_to_copy_default_3)
mm_1: bf16[8, 4] = aten.mm.default(t_default_1, _to_copy_default)
gathered_default_1: bf16[8, 4] = kp.gathered.default(mm_1)
_to_copy_default_4: f32[8, 4] = aten._to_copy.default(gathered_default_1, dtype=torch.float32)
t_2: f32[4, 8] = aten.t.default(_to_copy_default_4)
t_default_2: bf16[8, 4] = aten.t.default(t_default)
mm_2: bf16[6, 4] = aten.mm.default(_to_copy_default_3, t_default_2)
_to_copy_default_5: f32[6, 4] = aten._to_copy.default(mm_2, dtype=torch.float32)
t_4: f32[8, 4] = aten.t.default(t_2)
detach_6: f32[6, 4] = aten.detach.default(detach_1)
detach_7: f32[6, 4] = aten.detach.default(detach_6)
threshold_backward: f32[6, 4] = aten.threshold_backward.default(_to_copy_default_5, detach_7, 0)
return [tanh, threshold_backward, t_4]""",
    )


def mlp(x, w, v):
    return F.linear(F.gelu(F.linear(x, w)), v).square().mean()


def test_nothing_that_is_gathered_is_saved():
    for passes in ((), (CastBf16(), RecomputeCasts())):
        gm = trace_joint(mlp, leaf(6, 4), leaf(8, 4), leaf(4, 8))
        for graph_pass in (*passes, GatherWeights(weights(1, 2))):
            applied(graph_pass, gm)
        num_results = num_forward_results(gm.graph)
        forward, backward = partitioned(gm)
        saved = forward.graph.output_node().args[0][num_results:]
        assert not any(reads_gathered(node) for node in saved)
        assert len(list(calls(backward.graph, GATHERED))) == 4  # both weights, and both gradients


def reads_gathered(node):
    """Whether a value is a view or a cast of a gathered one."""
    while node.op == "call_function" and node.target is not GATHERED and len(node.all_input_nodes) == 1:
        [node] = node.all_input_nodes
    return node.target is GATHERED


def test_what_the_matrix_unit_would_round_is_rounded_before_it_is_gathered():
    gm = trace_inference(F.linear, torch.randn(6, 4), leaf(8, 4))
    for graph_pass in (CastBf16(), FoldCasts()):
        applied(graph_pass, gm)
    assert applied(GatherWeights(weights(1)), gm).rewritten == 1
    [whole] = calls(gm.graph, GATHERED)
    assert whole.meta["val"].dtype == torch.bfloat16


@pytest.mark.parametrize("fn", [
    lambda x, w: F.embedding(x.long(), w), lambda x, w: x * w[0], lambda x, w: x @ w.tanh(),
    lambda x, w: torch.bmm(x[None], w[None]),
])  # fmt: skip
def test_other_uses_are_left_to_xla(fn):
    gm = trace_inference(fn, torch.ones(4, 4), torch.ones(4, 4))
    assert applied(GatherWeights(weights(1)), gm).rewritten == 0


def test_arguments_that_are_no_parameters_are_left_alone():
    gm = trace_joint(mlp, leaf(6, 4), leaf(8, 4), leaf(4, 8))
    assert applied(GatherWeights(()), gm).rewritten == 0


def test_a_weight_that_other_operators_read_is_gathered_for_the_matmul_only():
    def fn(tokens, w):
        return F.linear(F.embedding(tokens, w), w)

    gm = trace_inference(fn, torch.arange(5), torch.randn(5, 4))
    assert applied(GatherWeights(weights(1)), gm).rewritten == 1
    [embedding] = calls(gm.graph, torch.ops.aten.embedding.default)
    assert embedding.args[0].op == "placeholder"


@pytest.mark.parametrize(("rows", "num_gathered"), [(3, 0), (4, 1), (100, 1)])
def test_rows_that_are_fewer_than_the_weight_move_instead_of_it(rows, num_gathered):
    gm = trace_inference(F.linear, torch.randn(rows, 8), torch.randn(8, 8))
    assert applied(GatherWeights(weights(1)), gm).rewritten == num_gathered


@pytest.mark.parametrize(("spread", "is_there"), [(Spread(8, 8), True), (Spread(8, 4), False), (Spread(), False)])
def test_where_nothing_is_known_of_weights_it_runs_if_all_chips_are_along_the_batch(spread, is_there):
    pipeline = build_pipeline(CompileOptions().over(spread), parameters={2, 1})
    assert (GatherWeights(weights(1, 2)) in pipeline) == is_there
    assert any(p.name == "gather_weights" for p in pipeline) == is_there


def test_other_axes_go_on_dividing_the_weight_and_its_gradient():
    gm = trace_joint(lambda x, w: F.linear(x, w).tanh(), leaf(16, 4), leaf(8, 4))
    applied(GatherWeights((DividedWeight(1, ("model", ""), 1),), num_parts=2), gm)
    assert [node.args[1] for node in calls(gm.graph, GATHERED)] == ["model,"] * 2


@pytest.mark.parametrize(("num_parts", "axes"), [(4, ["model,", "model,,"]), (8, ["model,"])])
def test_the_parts_of_a_weight_are_those_of_its_heads(num_parts, axes):
    """Of 4 heads of 32, which do not divide in 8 parts: only the forward's matmul reads the weight without heads."""

    def heads(x, w):
        return F.linear(x, w).view(8, 32, 4, 32).transpose(1, 2).tanh()

    gm = trace_joint(heads, leaf(8, 32, 128), leaf(128, 128))
    for graph_pass in (CastBf16(), FoldViews()):
        applied(graph_pass, gm)
    applied(GatherWeights((DividedWeight(1, ("model", ""), 1),), num_parts), gm)
    assert [node.args[1] for node in calls(gm.graph, GATHERED)] == axes


@pytest.mark.parametrize(("dim", "axes"), [(1, ["model,"] * 2), (None, [])])
def test_chips_that_divide_the_classes_compute_the_same_blocks_of_theirs(dim, axes):
    def loss(x, w, target):
        return F.cross_entropy(F.linear(x, w), target)

    gm = joint(loss, leaf(6, 4), leaf(8, 4), torch.arange(6))
    assert applied(FuseLinearCrossEntropy(min_bytes=0), gm).rewritten == 1
    applied(GatherWeights((DividedWeight(1, ("model", ""), dim),), num_parts=2), gm)
    fused = list(calls(gm.graph, *CROSS_ENTROPIES))
    assert [node.kwargs["parts"] for node in fused] == [2, 2]
    assert [node.args[1] for node in calls(gm.graph, GATHERED)] == axes  # the weight, and its gradient


def test_parameters_that_lie_along_the_batch_are_gathered_on_a_mesh_of_two_axes():
    placements = {0: ("model", "data"), 1: (("model", "data"), None), 2: ("model", None), 3: (None, None)}
    pipeline = build_pipeline(CompileOptions().over(Spread(8, 4)), parameters={0, 1, 2, 3, 4}, placements=placements)
    expected = (
        DividedWeight(0, ("model", ""), 1),
        DividedWeight(1, ("model", ""), 0),
        DividedWeight(2, ("model", "")),
    )
    assert GatherWeights(expected, num_parts=2) in pipeline


def test_without_a_batch_that_is_divided_it_runs_for_the_head():
    pipeline = build_pipeline(CompileOptions().over(Spread(8, 1, 8)), parameters={0}, placements={0: ("model", None)})
    assert GatherWeights((DividedWeight(0, ("model", "")),), num_parts=8) in pipeline
