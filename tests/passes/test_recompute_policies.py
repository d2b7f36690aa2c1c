"""Which values of a forward are computed again: scores, all but residual sums, the cheapest first."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kp_dynamo.autograd.decompositions.table import decompositions
from kp_dynamo.graph.saved_values import ForwardPart, flops_of, saved_by_min_cut
from kp_dynamo.graph.unrepeatable import is_always_saved
from kp_dynamo.passes.recompute.policies import attention_scores, cheapest_first, residual_sums
from kp_dynamo.passes.recompute_attention import RecomputeAttention
from kp_dynamo.passes.recompute_blocks import RecomputeBlocks
from kp_dynamo.passes.recompute_to_share import RecomputeToShare
from tests.graphs import trace_inference, trace_joint
from tests.transformer import TinyGpt

B, H, S, D = 2, 2, 16, 8


def joint_of(fn, *args):
    return trace_joint(fn, *args, decompositions=decompositions())


def gpt_joint(length=S, **how):
    model = TinyGpt(length=length, **how)
    names = [n for n, _ in model.named_parameters()]

    def loss(tokens, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (tokens,))

    return joint_of(loss, torch.zeros(B, length, dtype=torch.int64), *model.parameters())


def forward_nodes(gm):
    return ForwardPart(gm.graph, ()).nodes


def attend(q, k, v):
    return (F.softmax(q @ k.transpose(-1, -2) / 3 + torch.ones(q.shape[-2], q.shape[-2]).tril(), -1) @ v).sum()


def qkv(length=S):
    return [torch.randn(B, H, length, D).requires_grad_() for _ in range(3)]


def test_scores_are_what_lies_between_the_products():
    nodes = attention_scores(forward_nodes(joint_of(attend, *qkv())))
    assert {n.meta["val"].numel() for n in nodes} == {B * H * S * S}
    assert [str(n.target) for n in nodes if "bmm" in str(n.target) or "softmax" in str(n.target)] == [
        "aten.bmm.default",
        "aten._softmax.default",
    ]


def test_a_softmax_without_products_is_no_attention():
    gm = joint_of(lambda x, w: F.softmax(x @ w, -1).square().sum(), *[torch.randn(8, 8).requires_grad_() for _ in "xw"])
    assert attention_scores(forward_nodes(gm)) == []


def test_dropout_of_the_probabilities_is_drawn_once():
    def dropped(q, k, v):
        return (F.dropout(F.softmax(q @ k.transpose(-1, -2), -1), 0.5) @ v).sum()

    nodes = forward_nodes(joint_of(dropped, *qkv()))
    scores = attention_scores(nodes)
    assert scores
    assert any(is_always_saved(n) for n in nodes)
    assert not any(is_always_saved(n) for n in scores)


@torch.library.custom_op("test_recompute_policies::pair", mutates_args=())
def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x + 1


@pair.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


pair.register_autograd(lambda ctx, first, second: 2 * first + second)


def test_results_of_an_operator_of_the_user_s_own_are_saved():
    def attended(q, k, v):
        first, second = pair(q @ k.transpose(-1, -2))
        return (F.softmax(first * second, -1) @ v + q.sin()).sum()

    gm = joint_of(attended, *qkv())
    assert RecomputeToShare(0.0)(gm).rewritten
    saved = saved_by_min_cut(gm)
    assert [n.target for n in saved] == [operator.getitem] * 2


def test_blocks_end_at_the_sums_with_what_products_made():
    sums = residual_sums(forward_nodes(gpt_joint(num_blocks=3)))
    assert len(sums) == 6
    assert {tuple(n.meta["val"].shape) for n in sums} == {(B, S, 64)}


def test_a_norm_behind_the_sum_changes_nothing():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    names = [n for n, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,)).sum()

    gm = joint_of(run, torch.randn(B, S, 8).requires_grad_(), *layer.parameters())
    sums = residual_sums(forward_nodes(gm))
    assert len(sums) == 1  # the first x is the input of the graph, which is there anyway


def test_a_polynomial_is_no_block():
    def spelled_gelu(x, w):
        h = x @ w
        return (0.5 * h * (1 + torch.tanh(0.8 * (h + 0.044715 * h**3)))).sum()

    gm = joint_of(spelled_gelu, *[torch.randn(8, 8).requires_grad_() for _ in "xw"])
    assert residual_sums(forward_nodes(gm)) == []


def test_the_cheapest_bytes_go_first_and_what_runs_again_is_counted_once():
    gm = gpt_joint()
    part = ForwardPart(gm.graph, saved_by_min_cut(gm))
    before = part.saved_bytes()
    steps = list(cheapest_first(part, lambda n: False))
    assert part.saved_bytes() == before - sum(s.freed_bytes for s in steps)
    scores = set(attention_scores(part.nodes))
    assert [s.node in scores for s in steps] == sorted((s.node in scores for s in steps), reverse=True)
    forward_flops = sum(s.flops for s in steps)
    everything = ForwardPart(gm.graph, ())
    assert 0 < forward_flops <= flops_of(everything.nodes)


def test_what_stays_is_never_given_up():
    gm = gpt_joint(dropout=0.1)
    part = ForwardPart(gm.graph, saved_by_min_cut(gm))
    ends = set(residual_sums(part.nodes))
    given_up = {s.node for s in cheapest_first(part, lambda n: n in ends)}
    assert given_up
    assert not given_up & ends
    assert not any(is_always_saved(n) for n in given_up)
    assert any(is_always_saved(n) for n in part.saved)


@pytest.mark.quick("1.0", "0.7", "0.0")
@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.1, 0.0])
def test_a_share_of_the_bytes_stays(share):
    gm = gpt_joint()
    before = ForwardPart(gm.graph, saved_by_min_cut(gm)).saved_bytes()
    report = RecomputeToShare(share)(gm)
    after = ForwardPart(gm.graph, saved_by_min_cut(gm)).saved_bytes()
    assert after <= share * before
    assert bool(report.rewritten) == (share < 1)
    assert share == 1 or f"of {before / 2**20:.1f} MiB" in report.notes[0]


def test_blocks_save_their_ends_alone():
    gm = gpt_joint(num_blocks=3)
    sums = residual_sums(forward_nodes(gm))
    report = RecomputeBlocks()(gm)
    assert set(saved_by_min_cut(gm)) <= set(sums)
    assert report.notes[0].startswith("saves the sums at the ends of 6 blocks")


def test_without_blocks_nothing_is_tagged_and_the_reason_is_given():
    gm = joint_of(lambda x, w: (x @ w).exp().sum(), *[torch.randn(8, 8).requires_grad_() for _ in "xw"])
    report = RecomputeBlocks()(gm)
    assert report.rewritten == 0
    assert "Try: a share of 0 to 1" in report.refused[0][1]


@pytest.mark.parametrize("graph_pass", [RecomputeAttention(), RecomputeBlocks(), RecomputeToShare(0.0)])
def test_an_inference_graph_is_left_alone(graph_pass):
    assert graph_pass(trace_inference(attend, *qkv())).rewritten == 0
