"""What a backward computes again: casts and views of bfloat16, and never what the user has decided about."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.recompute_casts import RecomputeCasts
from tests.graphs import graph_text, trace_inference, trace_joint
from tests.spine import check_gradients_like_eager, compiled


def two_products(x, v, w):
    return ((x @ v).exp() @ w.t()).sum()


def joint_graph():
    args = [torch.randn(6, 4), torch.randn(4, 8), torch.randn(3, 8)]
    gm = trace_joint(two_products, *[a.requires_grad_() for a in args])
    CastBf16("matmul")(gm)
    return gm


def tagged(gm):
    return [n.name for n in gm.graph.nodes if "recompute" in n.meta]


def saved(gm, *, num_fwd_outputs=1):
    """What crosses from forward to backward, by dtype and shape; inputs aside."""
    forward, _ = min_cut_rematerialization_partition(gm, [], num_fwd_outputs=num_fwd_outputs)
    results = next(n for n in forward.graph.nodes if n.op == "output").args[0][num_fwd_outputs:]
    return [(n.meta["val"].dtype, tuple(n.meta["val"].shape)) for n in results if n.op != "placeholder"]


def test_casts_and_views_of_the_forward_are_tagged():
    gm = trace_joint(lambda x, w: (x.t() @ w).sum(), *[torch.randn(4, 4).requires_grad_() for _ in range(2)])
    CastBf16("matmul")(gm)
    before = graph_text(gm)
    report = RecomputeCasts()(gm)
    assert graph_text(gm) == before
    assert report.rewritten == len(tagged(gm))
    assert_expected_inline(
        "\n".join(line for line in before.splitlines() if line.split(":")[0] in tagged(gm)),
        """\
_to_copy_default: bf16[4, 4] = aten._to_copy.default(primals_1, dtype=torch.bfloat16)
t_default: bf16[4, 4] = aten.t.default(_to_copy_default)
_to_copy_default_1: bf16[4, 4] = aten._to_copy.default(primals_2, dtype=torch.bfloat16)
_to_copy_default_2: f32[4, 4] = aten._to_copy.default(mm, dtype=torch.float32)
t_default_1: bf16[4, 4] = aten.t.default(t_default)
_to_copy_default_3: f32[4, 4] = aten._to_copy.default(t_default_1, dtype=torch.float32)
_to_copy_default_6: f32[4, 4] = aten._to_copy.default(_to_copy_default_1, dtype=torch.float32)""",
    )


def test_a_second_run_tags_nothing():
    gm = joint_graph()
    RecomputeCasts()(gm)
    assert RecomputeCasts()(gm).rewritten == 0


def test_no_widened_value_and_no_view_is_saved():
    without, with_pass = joint_graph(), joint_graph()
    RecomputeCasts()(with_pass)
    assert saved(with_pass) == [(torch.float32, (6, 8))]
    assert len(saved(without)) > 1  # casts and permuted copies beside it


def test_an_inference_graph_is_left_alone():
    gm = trace_inference(two_products, torch.randn(6, 4), torch.randn(4, 8), torch.randn(3, 8))
    CastBf16("matmul")(gm)
    assert RecomputeCasts()(gm).rewritten == 0
    assert tagged(gm) == []


def test_a_float32_graph_is_left_alone():
    gm = trace_joint(two_products, *[torch.randn(s).requires_grad_() for s in ((6, 4), (4, 8), (3, 8))])
    assert RecomputeCasts()(gm).rewritten == 0


def test_the_users_own_tags_stay():
    gm = joint_graph()
    cast = next(n for n in gm.graph.nodes if n.target is torch.ops.aten._to_copy.default)
    cast.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    RecomputeCasts()(gm)
    assert cast.meta["recompute"] == CheckpointPolicy.MUST_SAVE


def test_gradients_are_those_of_eager():
    args = [torch.randn(s, requires_grad=True) for s in ((6, 4), (4, 8), (3, 8))]
    check_gradients_like_eager(two_products, *args)


def test_gradients_do_not_change():
    """bfloat16 values that are computed again are the same, bit by bit."""
    x = torch.randn(5, 8)
    gradients = []
    for disabled in ([], ["recompute_casts"]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4))
        run = compiled(model, precision="bfloat16", disable_passes=disabled)
        run(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_checkpoint_of_the_user_keeps_working():
    layer = nn.Linear(8, 8)

    def fn(x):
        return torch.utils.checkpoint.checkpoint(lambda y: layer(y).sin(), layer(x).cos(), use_reentrant=False).sum()

    x = torch.randn(4, 8, requires_grad=True)
    [expected] = torch.autograd.grad(fn(x), [x])
    [got] = torch.autograd.grad(compiled(fn, precision="bfloat16")(x), [x])
    assert (got - expected).norm() < 2e-2 * expected.norm()  # two products of operands rounded to 2**-9
