"""DivideHeads: values do not change, whatever the attention has, and the heads of each chip are neighbours."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from kp_dynamo.autograd.decompositions.table import decompositions
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.graph.nodes import calls
from kp_dynamo.graph.placements import result_placements
from kp_dynamo.hardware import Spread
from kp_dynamo.ops.attention_args import AttentionArgs
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.divide_heads import DivideHeads
from kp_dynamo.passes.flash_attention import FlashAttention
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from kp_dynamo.pipeline import build_pipeline
from kp_dynamo.sharding.mesh import NamedMesh
from tests.graphs import applied, graph_text, trace_inference, trace_joint

kp = torch.ops.kp
BATCH, HEADS, QUERIES, KEYS, WIDTH = 4, 8, 6, 10, 16
PASS = DivideHeads(2, 4)


def leaf(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_(dtype.is_floating_point)


def qkv(key_heads=HEADS, keys=KEYS, batch=BATCH):
    return leaf(batch, HEADS, QUERIES, WIDTH), *(leaf(batch, key_heads, keys, WIDTH) for _ in range(2))


def sdpa(q, k, v, mask=None, **options):
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1], **options)


def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def transposed(q, k, v):
    """As in a model, whose heads are views of a projection."""
    return sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


def capped(q, k, v):
    return (4 * torch.tanh(q @ k.mT / 4)).softmax(-1) @ v


def with_sinks(q, k, v, sinks):
    scores = torch.cat([q @ k.mT, sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def mask(*shape):
    found = torch.rand(shape) > 0.3
    found[..., 0] = True  # each query reads a key
    return found


def dropped(q, k, v):
    return sdpa(q, k, v, dropout_p=0.25)


CASES = {
    "plain": (sdpa, qkv()),
    "causal": (causal, qkv(keys=QUERIES)),
    "transposed": (transposed, [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in qkv()]),
    "shared keys": (sdpa, qkv(key_heads=4)),
    "mask of the batch": (sdpa, (*qkv(), mask(BATCH, 1, 1, KEYS))),
    "mask of heads": (sdpa, (*qkv(), mask(HEADS, QUERIES, KEYS))),
    "mask of all": (sdpa, (*qkv(key_heads=4), mask(BATCH, HEADS, QUERIES, KEYS))),
    "mask of keys": (sdpa, (*qkv(), mask(QUERIES, KEYS))),
    "added mask": (sdpa, (*qkv(), torch.randn(BATCH, 1, QUERIES, KEYS))),
    "soft cap": (capped, qkv()),
    "sinks": (with_sinks, (*qkv(), leaf(HEADS))),
    "dropout": (dropped, qkv()),
}


def traced(trace, fn, args, *passes):
    with sdpa_kernel(SDPBackend.MATH):
        gm = trace(fn, *args, decompositions=decompositions())
    for graph_pass in (FoldConstants(), RewriteAttention(), *passes):
        graph_pass(gm)
    gm.recompile()
    return gm


def results(gm, trace, fn, args):
    """Of the graph, with a random gradient of the result in training; random numbers are those of one seed."""
    torch.manual_seed(1)
    given = [x.detach() for x in args]
    tangent = [torch.randn(fn(*given).shape)]
    torch.manual_seed(2)
    found = tree_leaves(gm(given, tangent) if trace is trace_joint else gm(*given))
    return [x for x in found if x is not None]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("trace", [trace_inference, trace_joint])
def test_values_do_not_change(name, trace):
    fn, args = CASES[name]
    gm = traced(trace, fn, args)
    before = results(gm, trace, fn, args)
    report = applied(PASS, gm)
    assert (report.rewritten, report.refused) == (1, ())
    after = results(gm, trace, fn, args)
    for old, new in zip(before, after, strict=True):
        assert (new.shape, new.stride()) == (old.shape, old.stride())
        # Whole heads change places; the CPU may sum the products of another head in another order.
        assert (new - old).norm() <= 1e-6 * old.norm()


def test_a_learned_bias_stays():
    gm = traced(trace_joint, lambda q, k, v, bias: sdpa(q, k, v, bias), (*qkv(), leaf(HEADS, QUERIES, KEYS)))
    assert list(calls(gm.graph, kp.attention_backward.bias))
    [(_, reason)] = applied(PASS, gm).refused
    assert "learned bias" in reason


@pytest.mark.parametrize(("args", "reason"), [
    (qkv(batch=3), "3 sequences of 8 heads, with 8 of keys, do not divide among 2 x 4 chips"),
    (qkv(key_heads=2), "4 sequences of 8 heads, with 2 of keys, do not divide among 2 x 4 chips"),
])  # fmt: skip
def test_what_does_not_divide_stays(args, reason):
    gm = traced(trace_inference, sdpa, args)
    before = graph_text(gm)
    [(_, said)] = applied(PASS, gm).refused
    assert reason in said
    assert graph_text(gm) == before


def test_a_second_run_changes_nothing():
    for name in ("transposed", "mask of all"):
        gm = traced(trace_joint, *CASES[name], PASS)
        assert applied(PASS, gm).rewritten == 0


def test_readers_take_heads_without_joining_them_to_sequences():
    gm = traced(trace_inference, transposed, CASES["transposed"][1], PASS)
    text = graph_text(gm)
    assert_expected_inline(
        text[text.index("attention_default") :],
        """\
attention_default_1: f32[32, 6, 16] = kp.attention.default(reshape_default_1, reshape_default_3, reshape_default_5, [], [], [], 0.25, False, False, 512)
reshape_default_6: f32[2, 4, 2, 2, 6, 16] = aten.reshape.default(attention_default_1, [2, 4, 2, 2, 6, 16])
permute_default_3: f32[2, 2, 4, 2, 6, 16] = aten.permute.default(reshape_default_6, [0, 2, 1, 3, 4, 5])
reshape_default_7: f32[4, 8, 6, 16] = aten.reshape.default(permute_default_3, [4, 8, 6, 16])
transpose_4: f32[4, 6, 8, 16] = aten.transpose.int(reshape_default_7, 1, 2)
clone_3: f32[4, 6, 8, 16] = aten.clone.default(transpose_4, memory_format=torch.contiguous_format)
_unsafe_view_3: f32[4, 6, 128] = aten._unsafe_view.default(clone_3, [4, 6, 128])
return (_unsafe_view_3,)""",  # noqa: E501
    )


def test_kernels_are_called_in_the_new_order():
    args = [leaf(2, 4, 128, 64) for _ in range(3)]
    gm = traced(trace_joint, causal, args, DivideHeads(2, 2), FlashAttention())
    assert len(list(calls(gm.graph, kp.flash_attention_train.default))) == 1
    assert len(list(calls(gm.graph, kp.flash_attention_backward.default))) == 1


def block(x: Tensor, *weights: Tensor) -> Tensor:
    """Attention of a model: projections to q, k and v, and one of its result."""
    q, k, v = (F.linear(x, w).view(BATCH, 32, HEADS, 32).transpose(1, 2) for w in weights[:3])
    return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), weights[3])


@pytest.mark.parametrize("passes", [(), (CastBf16(), FoldViews())])
def test_operands_and_results_lie_along_both_axes(passes):
    """Nothing is gathered on the way from a projection that is divided by heads to the next one."""
    args = leaf(BATCH, 32, 256), *(leaf(256, 256) for _ in range(4))
    gm = traced(trace_joint, block, args, *passes, PASS)
    [attention] = calls(gm.graph, kp.attention_train.default)
    found = AttentionArgs.of(attention)
    output = gm.graph.output_node()
    [backward] = calls(gm.graph, kp.attention_backward.default)
    output.args = ([found.q, found.k, found.v, AttentionArgs.of(backward).backward.grad],)
    mesh = NamedMesh.of({"data": 2, "model": 4})
    given = [("data", None, None), *[("model", None)] * 3, (None, "model"), ("data", None, None)]
    placements = result_placements(gm.graph, given, mesh)
    assert placements == [(("data", "model"), None, None)] * 4


@pytest.mark.parametrize(("spread", "is_there"), [
    (Spread(8, 2, 4), True), (Spread(8, 1, 8), True), (Spread(8, 8), False), (Spread(8, 4), False), (Spread(), False),
])  # fmt: skip
def test_it_runs_on_a_mesh_that_divides_heads(spread, is_there):
    pipeline = build_pipeline(CompileOptions().over(spread))
    assert (DivideHeads(spread.batch_parts, spread.head_parts) in pipeline) == is_there
    assert any(p.name == PASS.name for p in pipeline) == is_there
