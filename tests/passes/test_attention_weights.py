"""RewriteAttention where something else reads the weights, and on the attention of `nn.MultiheadAttention`."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from tests.graphs import graph_text, trace_inference, trace_joint
from tests.passes.test_rewrite_attention import F64, OURS, qkv, rewritten, traced

aten, kp = torch.ops.aten, torch.ops.kp


def weights_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT * 0.5).softmax(-1)


def read_by(read: Callable[[Tensor], Tensor], rate: float = 0.0) -> Callable:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = weights_of(q, k)
        return F.dropout(weights, rate, training=rate > 0) @ v, read(weights)

    return attend


def scores_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT
    return scores.softmax(-1) @ v, scores.detach().amax()


READ: dict[str, Callable] = {
    "returned": read_by(lambda w: w.detach()),
    "a mean over heads": read_by(lambda w: w.detach().mean(1)),
    "an entropy": read_by(lambda w: -(w * w.log()).sum(-1).mean().detach()),
    "the most attended key": read_by(lambda w: w.argmax(-1)),
    "the largest score": scores_too,
}


@pytest.mark.parametrize("name", READ)
def test_readers_without_a_gradient_get_weights_of_their_own(name):
    operands = qkv()
    gm = traced(trace_joint, READ[name], *operands)
    inputs = [t.detach() for t in operands]
    tangent = torch.randn(2, 2, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        report = rewritten(gm_of_block, block)
        assert (report.rewritten, report.refused) == (1, ())
        left = [n.target for n in gm_of_block.graph.nodes if n.op == "call_function"]
        assert left.count(aten.bmm.default) == 1  # the scores of the reader
        assert aten._softmax_backward_data.default not in left
        torch.testing.assert_close(gm_of_block(inputs, [tangent]), before, rtol=1e-12, atol=1e-12)
        text = graph_text(gm_of_block)
        assert rewritten(gm_of_block, block).rewritten == 0
        assert graph_text(gm_of_block) == text


def test_a_reader_before_the_dropout_gets_the_probabilities():
    operands = qkv()
    fn = read_by(lambda w: w.detach().mean(1), 0.3)
    gm = traced(trace_joint, fn, *operands)
    assert rewritten(gm).rewritten == 1
    tangent = torch.ones(2, 2, 6, 4, dtype=F64)
    (_, found), _ = gm([t.detach() for t in operands], [tangent])
    torch.testing.assert_close(found, fn(*operands)[1], rtol=1e-12, atol=1e-12)


def dropped_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As in transformers: the weights that are returned are those after dropout."""
    weights = F.dropout(weights_of(q, k), 0.3)
    return weights @ v, weights.detach()


def in_a_loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weights_of(q, k)
    return weights @ v + weights.square().sum()


REFUSED: dict[str, tuple[Callable, str]] = {
    "returned with a gradient": (read_by(lambda w: w), "is an output of the graph, and the gradient of its prob"),
    "averaged with a gradient": (read_by(lambda w: w.mean(1)), "also reads _softmax, and the gradient of its prob"),
    "in a loss": (in_a_loss, "also reads _softmax, and the gradient of its prob"),
    "after dropout": (dropped_too, "after the dropout of its probabilities"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    fn, reason = REFUSED[name]
    gm = traced(trace_joint, fn, *qkv())
    text = graph_text(gm)
    report = rewritten(gm)
    assert report.rewritten == 0
    assert [reason in why for _, why in report.refused] == [True], report.refused
    assert graph_text(gm) == text


def test_inference_gains_nothing_beside_whole_weights():
    gm = traced(trace_inference, READ["a mean over heads"], *(t.detach() for t in qkv()))
    assert ["without a gradient, there is nothing to gain" in why for _, why in rewritten(gm).refused] == [True]


SIZES = 2, 6, 8  # sequences, tokens, width
KEY_PADDING = torch.arange(6) >= torch.tensor([[6], [4]])
CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "causal": {"attn_mask": CAUSAL},
    "added": {"attn_mask": torch.zeros(6, 6, dtype=F64).masked_fill(CAUSAL, -math.inf)},
    "padding": {"key_padding_mask": KEY_PADDING},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": KEY_PADDING},
    "of heads": {"attn_mask": torch.linspace(-1, 1, 2 * 2 * 36, dtype=F64).view(4, 6, 6)},
}


def multihead(dtype: torch.dtype, **masks: Tensor) -> tuple[Callable, list[Tensor]]:
    """The attention of a layer that also returns weights, as a function of x, the parameters and the masks."""
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=dtype)
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(SIZES, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def fn(x: Tensor, *rest: Tensor) -> Tensor:
        given = rest[len(names) :]
        named = dict(zip(masks or ("attn_mask",), given, strict=bool(masks)))
        return functional_call(layer, dict(zip(names, rest, strict=False)), (x, x, x), named)[0]

    return fn, [x, *layer.parameters(), *masks.values()]


@pytest.mark.quick("causal", "both", "of heads")
@pytest.mark.parametrize("mask", MASKS)
def test_multihead_attention_whose_weights_are_dropped(mask):
    """torch adds the mask in `baddbmm` where it also returns weights."""
    fn, operands = multihead(F64, **MASKS[mask])
    gm = traced(trace_joint, fn, *operands)
    inputs = [t.detach() for t in operands]
    tangent = torch.empty_like(fn(*inputs)).normal_(generator=torch.Generator().manual_seed(2))  # in its strides
    before = gm(inputs, [tangent])
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        report = rewritten(gm_of_block, block)
        assert (report.rewritten, report.refused) == (1, ())
        torch.testing.assert_close(gm_of_block(inputs, [tangent]), before, rtol=1e-11, atol=1e-12)


def test_a_causal_mask_of_multihead_attention_is_a_comparison_of_positions():
    fn, operands = multihead(torch.float32)
    gm = traced(
        trace_inference,
        lambda *a: fn(*a, torch.full((6, 6), -math.inf).triu(1)),
        *(t.detach() for t in operands),
    )
    assert rewritten(gm).rewritten == 1
    (call,) = (n for n in gm.graph.nodes if n.target in OURS)
    assert (call.args[3], call.args[7]) == ([], True)


def test_a_matmul_that_adds_a_multiple_is_no_score_matmul():
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias, q[0], k[0].mT, beta=0.5).softmax(-1) @ v[0]

    gm = traced(trace_inference, fn, *(t.detach() for t in qkv()), torch.ones(2, 6, 6, dtype=F64))
    assert rewritten(gm).rewritten == 0


def test_a_mask_that_the_matmul_adds_before_a_factor_is_refused():
    def fn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return (torch.baddbmm(bias, q[0], k[0].mT) * 0.5).softmax(-1) @ v[0]

    gm = traced(trace_inference, fn, *(t.detach() for t in qkv()), torch.ones(2, 6, 6, dtype=F64))
    assert ["masks the scores before they are scaled" in why for _, why in rewritten(gm).refused] == [True]
