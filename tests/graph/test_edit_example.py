"""The example of an edit: the operators before and after, from references alone."""

from __future__ import annotations

import torch
from torch import nn

from kp_dynamo.graph.edit_example import MAX_LINES, EditExamples
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.passes.recompute_casts import RecomputeCasts
from tests.graphs import graph_text, trace_inference, trace_joint

X, WEIGHT = torch.randn(4, 8), torch.randn(8, 16)


def example(gm, graph_pass):
    examples = EditExamples(gm.graph)
    assert graph_pass(gm).rewritten
    return examples.of_edit()


def test_operators_before_and_after_with_their_line():
    gm = trace_inference(lambda x, w, b: torch.relu(nn.functional.linear(x, w, b)).exp(), X, WEIGHT.T, torch.randn(16))
    found = example(gm, FuseLinearActivation())
    assert found.before == (
        "addmm: f32[4, 16] = aten.addmm(arg2_1, arg0_1, t)",
        "relu: f32[4, 16] = aten.relu(addmm)",
        "exp: f32[4, 16] = aten.exp(relu)",
    )
    assert found.after == (
        "linear_act_default: f32[4, 16] = kp.linear_act(arg0_1, t, arg2_1, relu)",
        "exp: f32[4, 16] = aten.exp(linear_act_default)",
    )
    assert found.num_more == 0


def test_a_tag_is_shown_and_what_does_not_change_is_not():
    w = WEIGHT.bfloat16().requires_grad_()
    gm = trace_joint(lambda x, w: torch.mm(x, w.t().t()), X.bfloat16(), w)
    found = example(gm, RecomputeCasts())
    tag = "  # recomputed in the backward"
    assert [line.removesuffix(tag) for line in found.after] == list(found.before)
    assert all(line.endswith(tag) for line in found.after)


def test_a_long_edit_is_cut_and_says_so():
    def deep(x):
        for _ in range(30):
            x = torch.mm(x, x)
        return x

    found = example(trace_inference(deep, torch.randn(4, 4)), CastBf16("matmul"))
    assert max(len(found.before), len(found.after)) == MAX_LINES
    assert found.num_more > 0


def test_both_sides_are_shown_of_a_long_chain_that_one_operator_replaces():
    def chain(x):
        for _ in range(20):
            x = x.sin()
        return x.exp()

    gm = trace_inference(chain, X)
    examples = EditExamples(gm.graph)
    (x,), *_, last, end, _ = gm.graph.find_nodes(op="placeholder"), *gm.graph.nodes
    with gm.graph.inserting_before(end):
        new = gm.graph.call_function(torch.ops.aten.cos.default, (x,))
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    gm.graph.eliminate_dead_code()
    found = examples.of_edit()
    assert (len(found.before), found.num_more) == (MAX_LINES, 21 - MAX_LINES)
    assert any("aten.cos" in line for line in found.after)


def test_nothing_changed_is_no_example_and_the_next_edit_is_told_apart():
    gm = trace_inference(lambda x, w: torch.relu(torch.mm(x, w)).exp(), X, WEIGHT)
    examples, before = EditExamples(gm.graph), graph_text(gm)
    assert examples.of_edit() is None
    assert graph_text(gm) == before
    assert CastBf16("matmul")(gm).rewritten
    assert examples.of_edit() is not None
    assert examples.of_edit() is None
