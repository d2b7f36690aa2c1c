"""RewriteAttention: what it fires on, what it refuses and why, and what it does to values and gradients.

B, H, S, T, D are the sizes of a batch, its heads, queries, keys and the width of a head.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from kp_dynamo.autograd.decompositions.table import decompositions
from kp_dynamo.ops.dropout_mask import KEY_SIZE, Dropout
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from tests.graphs import graph_text, trace_inference, trace_joint

OURS = (torch.ops.kp.attention.default, torch.ops.kp.attention_train.default)
aten = torch.ops.aten
F64 = torch.float64
INF = math.inf


def qkv(b: int = 2, h: int = 2, s: int = 6, t: int = 6, d: int = 4, dtype: torch.dtype = F64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (s, t, t)
    return [torch.randn(b, h, n, d, dtype=dtype, generator=generator).requires_grad_() for n in sizes]


def traced(trace: Callable, fn: Callable, *args: Tensor) -> fx.GraphModule:
    with sdpa_kernel(SDPBackend.MATH):
        gm = trace(fn, *args, decompositions=decompositions())
    FoldConstants()(gm)
    return gm


def rewritten(gm: fx.GraphModule, block: int = 512) -> PassReport:
    report = RewriteAttention(block)(gm)
    gm.graph.lint()
    gm.recompile()
    return report


def sdpa(**options: object) -> Callable:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def by_hand(change: Callable[[Tensor], Tensor]) -> Callable:
    """The attention of Hugging Face's models, with what they do to their scores."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
        scores = change(torch.matmul(q, k.transpose(2, 3)), *masks)
        return torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).contiguous()

    return attend


def window(scores: Tensor) -> Tensor:
    far = torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])
    return scores.masked_fill((far < 0) | (far > 2), -INF)


def alibi(scores: Tensor) -> Tensor:
    distance = torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-2])[:, None]
    slopes = 2.0 ** -torch.arange(1, scores.shape[1] + 1, dtype=scores.dtype)
    scores = scores * 0.5 + slopes[:, None, None] * distance
    return scores.masked_fill(distance > 0, torch.finfo(scores.dtype).min)


def repeat_kv(x: Tensor) -> Tensor:
    """transformers' form: [B, 2, T, D] -> [B, 4, T, D]."""
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, 2, t, d).reshape(b, 2 * h, t, d)


def of_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped heads as a dimension of their own, which matmul broadcasts."""
    scores = q.unflatten(1, (2, 2)) @ k[:, :2, None].transpose(-2, -1) * 0.5
    return (scores.softmax(-1) @ v[:, :2, None]).flatten(1, 2)


SHARED: dict[str, Callable] = {
    "repeat_kv": lambda q, k, v, *m: sdpa()(q, repeat_kv(k[:, :2]), repeat_kv(v[:, :2]), *m),
    "repeat_interleave": lambda q, k, v, *m: sdpa()(
        q, k[:, :2].repeat_interleave(2, 1), v[:, :2].repeat_interleave(2, 1), *m
    ),
    "enable_gqa": lambda q, k, v: sdpa(enable_gqa=True, is_causal=True)(q, k[:, :2], v[:, :2]),
    "groups": of_groups,
    "one head": lambda q, k, v: (q @ k[:, :1].mT * 0.3).softmax(-1) @ v[:, :1],
    "positions first": lambda q, k, v: sdpa()(
        q, *(repeat_kv(x.transpose(1, 2).contiguous().transpose(1, 2)[:, :2]) for x in (k, v))
    ),
}
KEYS = torch.arange(6) < torch.tensor([6, 4])[:, None, None, None]  # [B, 1, 1, T]
DEAD = torch.arange(6) < torch.tensor([6, 0])[:, None, None, None]  # nothing is left for the second sequence
BIAS = torch.linspace(-2, 2, 36, dtype=F64).view(1, 1, 6, 6)
MIN = torch.finfo(F64).min
CASES: dict[str, tuple[Callable, list[Tensor], tuple[Tensor, ...]]] = {
    "plain": (sdpa(), qkv(), ()),
    "causal": (sdpa(is_causal=True), qkv(), ()),
    "scale": (sdpa(scale=0.3), qkv(), ()),
    "more queries": (sdpa(is_causal=True), qkv(s=9), ()),
    "more keys": (sdpa(is_causal=True), qkv(t=9), ()),
    "cross": (sdpa(), qkv(s=3), ()),
    "decode": (sdpa(), qkv(s=1), (torch.ones(2, 1, 1, 6, dtype=torch.bool).tril(3),)),
    "keys": (sdpa(), qkv(), (KEYS,)),
    "dead": (sdpa(), qkv(), (DEAD,)),
    "bias": (sdpa(), qkv(), (BIAS,)),
    "dead bias": (sdpa(), qkv(), (torch.where(DEAD, torch.zeros((), dtype=F64), -INF),)),
    "heads": (sdpa(), qkv(), (torch.rand(2, 2, 6, 6, generator=torch.Generator().manual_seed(1)) > 0.3,)),
    "gqa": (lambda q, k, v: sdpa(enable_gqa=True)(q, k[:, :1], v[:, :1]), qkv(), ()),
    **{f"shared, {name}": (fn, qkv(h=4), ()) for name, fn in SHARED.items()},
    "shared, with a mask": (SHARED["repeat_kv"], qkv(h=4), (KEYS,)),
    "shared, with a bias": (SHARED["repeat_interleave"], qkv(h=4), (BIAS * torch.arange(1, 5)[:, None, None],)),
    "three dimensions": (lambda q, k, v: sdpa(is_causal=True)(q[:, 0], k[:, 0], v[:, 0]), qkv(), ()),
    "gpt2": (by_hand(lambda s, m, b: torch.where(m, s / 2, MIN) + b), qkv(), (KEYS, BIAS)),
    "t5": (by_hand(lambda s, b: s + b), qkv(), (BIAS,)),
    "bert": (by_hand(lambda s, b: s / 2.0 + b), qkv(), ((~KEYS).to(F64) * MIN,)),
    "window": (by_hand(window), qkv(), ()),
    "alibi": (by_hand(alibi), qkv(), ()),
    "causal by hand": (by_hand(lambda s: s * 0.5 + torch.full((6, 6), -INF).triu(1)), qkv(), ()),
    "dead by hand": (by_hand(lambda s, m: torch.where(m, s, MIN)), qkv(), (DEAD,)),
    "gemma 2": (by_hand(lambda s, b: torch.tanh(s * 0.5 / 3) * 3 + b), qkv(), (BIAS,)),
    "a soft cap alone": (by_hand(torch.tanh), qkv(), ()),
    "a soft cap and a fill": (by_hand(lambda s, m: (0.7 * torch.tanh(-2 * s)).masked_fill(~m, -INF)), qkv(), (KEYS,)),
    "a soft cap, shared heads": (
        lambda q, k, v, m: by_hand(lambda s: (s / 2).tanh().masked_fill(~m, MIN) * 2)(
            q, repeat_kv(k[:, :2]), repeat_kv(v[:, :2])
        ),
        qkv(h=4),
        (KEYS,),
    ),
    "mask before scale": (by_hand(lambda s, m: s.masked_fill(~m, -9.0) * 0.5), qkv(), (KEYS,)),
}


@pytest.mark.quick(
    "causal", "more queries", "decode", "dead", "dead bias", "gqa", "shared, groups", "shared, one head",
    "shared, with a mask", "three dimensions", "gpt2", "alibi", "gemma 2", "a soft cap, shared heads",
    "mask before scale",
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_stay(case):
    fn, operands, masks = CASES[case]
    gm = traced(trace_joint, fn, *operands, *masks)
    inputs = [t.detach() for t in (*operands, *masks)]
    tangent = torch.randn(fn(*inputs).shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        report = rewritten(gm_of_block, block)
        assert (report.rewritten, report.refused) == (1, ())
        assert not any(node.target is torch.ops.aten.bmm.default for node in gm_of_block.graph.nodes)
        # sums of at most nine products in another order
        torch.testing.assert_close(gm_of_block(inputs, [tangent]), before, rtol=1e-12, atol=1e-12)


def head_counts(gm: fx.GraphModule) -> list[tuple[int, ...]]:
    """The heads of q, k and v of each attention."""
    nodes = [node for node in gm.graph.nodes if node.target in OURS]
    return [tuple(operand.meta["val"].shape[0] for operand in node.args[:3]) for node in nodes]


@pytest.mark.quick("repeat_kv", "enable_gqa", "one head")
@pytest.mark.parametrize("name", SHARED)
def test_shared_heads_are_not_repeated(name):
    num_shared = 2 if name == "one head" else 4
    for trace in (trace_joint, trace_inference):
        gm = traced(trace, SHARED[name], *qkv(h=4))
        rewritten(gm)
        assert head_counts(gm) == [(8, num_shared, num_shared)]


def in_place(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """T5's form: autograd copies the gradient of what is overwritten."""
    scores = torch.matmul(q, k.transpose(3, 2))
    scores += b
    return F.dropout(F.softmax(scores.to(F64), -1).type_as(scores), 0.1, training=False) @ v


def seen_keys() -> Tensor:
    """[B, 1, 1, T]: six keys for the first sequence, four for the second."""
    return torch.arange(6) < 6 - 2 * torch.arange(2)[:, None, None, None]


def twice(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Two layers read the sum of a bias of heads and a mask of sequences."""
    masked = b + torch.zeros(2, 1, 1, 6, dtype=F64).masked_fill(~seen_keys(), MIN)
    return in_place(in_place(q, k, v, masked), k, v, masked)


LEARNED: dict[str, tuple[Callable, tuple[int, ...]]] = {
    "of heads": (by_hand(lambda s, b: s * 0.5 + b), (1, 4, 6, 6)),
    "without a batch": (by_hand(lambda s, b: b + s), (4, 6, 6)),
    "of all heads": (by_hand(lambda s, b: s + b), (6, 6)),
    "of keys": (by_hand(lambda s, b: s + b), (1, 4, 1, 6)),
    "sdpa": (lambda q, k, v, b: sdpa()(q, k, v, b.expand(2, 4, 6, 6)), (1, 4, 6, 6)),
    "masked after": (by_hand(lambda s, b: (s + b).masked_fill(~seen_keys(), -9.0)), (1, 4, 6, 6)),
    "after a soft cap": (by_hand(lambda s, b: (s / 2).tanh() * 2 + b), (1, 4, 6, 6)),
    "after a soft cap of 1": (by_hand(lambda s, b: s.tanh() + b), (1, 4, 6, 6)),
    "causal": (by_hand(lambda s, b: s + b + torch.full((6, 6), -INF, dtype=F64).triu(1)), (1, 4, 6, 6)),
    "with a mask": (
        by_hand(lambda s, b: s + (b + torch.zeros(2, 1, 1, 6, dtype=F64).masked_fill(~seen_keys(), MIN))),
        (1, 4, 6, 6),
    ),
    "in place": (in_place, (1, 4, 6, 6)),
    "twice": (twice, (1, 4, 6, 6)),
    "shared heads": (lambda q, k, v, b: SHARED["repeat_kv"](q, k, v, b.expand(2, 4, 6, 6)), (1, 4, 6, 6)),
    "keys of all sequences": (lambda q, k, v, b: (q[:, :1] @ k[:1, :1].mT + b).softmax(-1) @ v[:1, :1], (6, 6)),
}


def assert_rewritten_in_blocks(fn: Callable, operands: list[Tensor], num_attentions: int) -> None:
    """Every attention is rewritten, and values and gradients stay, in one block of queries and in several."""
    gm = traced(trace_joint, fn, *operands)
    inputs = [t.detach() for t in operands]
    tangent = torch.randn(fn(*inputs).shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        report = rewritten(gm_of_block, block)
        assert (report.rewritten, report.refused) == (num_attentions, ())
        torch.testing.assert_close(gm_of_block(inputs, [tangent]), before, rtol=1e-12, atol=1e-12)


@pytest.mark.quick(
    "of all heads", "of keys", "masked after", "after a soft cap", "twice", "shared heads", "keys of all sequences",
)  # fmt: skip
@pytest.mark.parametrize("name", LEARNED)
def test_the_gradient_of_a_bias_is_its_sum_over_the_batch(name):
    fn, shape = LEARNED[name]
    bias = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert_rewritten_in_blocks(fn, [*qkv(h=4), bias], 2 if name == "twice" else 1)


BLOCKS: dict[str, tuple[int, tuple[int, ...] | None]] = {
    "scores of 64 MiB": (512, None),
    "a mask of keys": (512, (2, 1, 1, 512)),
    "a mask of all heads": (512, (512, 512)),
    "a mask of sequences": (256, (2, 1, 512, 512)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_and_its_repeated_masks_fit_the_vector_memory(name):
    block, size = BLOCKS[name]
    with torch.device("meta"):
        inputs = [torch.empty(2, 32, 512, 2) for _ in range(3)] + ([] if size is None else [torch.empty(size)])
    gm = traced(trace_inference, by_hand(lambda s, *masks: sum(masks, s)), *inputs)
    assert rewritten(gm).rewritten == 1
    assert [n.args[9] for n in gm.graph.nodes if n.target in OURS] == [block]


@pytest.mark.parametrize(("keys", "block"), [(1024, 512), (2048, 256), (8192, 128)])
def test_longer_scores_make_smaller_blocks(keys, block):
    with torch.device("meta"):
        inputs = [torch.empty(2, 16, n, 2) for n in (512, keys, keys)]
    gm = traced(trace_inference, by_hand(lambda s: s), *inputs)
    assert rewritten(gm).rewritten == 1
    assert [n.args[9] for n in gm.graph.nodes if n.target in OURS] == [block]


def shared_by_layers(q: Tensor, k: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Two layers of T5, with one sequence."""
    return in_place(in_place(q, k, v, b), k, v, b)


ONE_SEQUENCE: dict[str, Callable] = {
    "a bias": by_hand(lambda s, b: s * 0.5 + b),
    "masked after": by_hand(lambda s, b: (s + b).masked_fill(~seen_keys()[1:], -9.0)),
    "in place": in_place,
    "computed": by_hand(lambda s, b: s + b.transpose(1, 2).sin().transpose(1, 2)),
    "read twice": by_hand(lambda s, b: s + b.expand(1, 4, 6, 6) + b.sum() * 0),
    "layers": shared_by_layers,
}


@pytest.mark.quick("in place", "computed", "layers")
@pytest.mark.parametrize("name", ONE_SEQUENCE)
def test_the_gradient_of_a_bias_of_one_sequence_is_that_of_its_scores(name):
    fn = ONE_SEQUENCE[name]
    bias = torch.randn(1, 4, 6, 6, dtype=F64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert_rewritten_in_blocks(fn, [*qkv(b=1, h=4), bias], 2 if name == "layers" else 1)


NOT_LEARNED: dict[str, tuple[Callable, tuple[int, ...], str]] = {
    "of each sequence, by SDPA": (sdpa(), (2, 4, 6, 6), "a learned mask"),
    "of each sequence": (by_hand(lambda s, b: s + b), (2, 4, 6, 6), "a learned mask"),
    "before a mask of scores": (
        by_hand(lambda s, b: s.masked_fill(~seen_keys(), -9.0) + b), (1, 4, 6, 6), "a learned mask",
    ),
    "before a soft cap": (by_hand(lambda s, b: (s + b).tanh()), (1, 4, 6, 6), "masks the scores before their soft cap"),
    "squared": (by_hand(lambda s, b: s + b * b), (2, 4, 6, 6), "a learned mask"),
    "two": (by_hand(lambda s, b: s + b + b[:, :1]), (1, 4, 6, 6), "a learned mask"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_LEARNED)
def test_other_learned_masks_are_refused(name):
    fn, shape, reason = NOT_LEARNED[name]
    bias = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    gm = traced(trace_joint, fn, *qkv(h=4), bias)
    report = rewritten(gm)
    assert report.rewritten == 0
    assert reason in report.refused[0][1]


KEPT_REPEATED: dict[str, Callable] = {
    "another gradient": lambda q, k, v: (lambda r: sdpa()(q, r, repeat_kv(v[:, :2])) * r.sum())(repeat_kv(k[:, :2])),
    "keys alone": lambda q, k, v: sdpa()(q, repeat_kv(k[:, :2]), v),
    "tiled": lambda q, k, v: sdpa()(q, k[:, :2].repeat(1, 2, 1, 1), v[:, :2].repeat(1, 2, 1, 1)),
    "other counts": lambda q, k, v: sdpa()(q, repeat_kv(k[:, :2]), v[:, :1].expand_as(v)),
    "changed between": lambda q, k, v: sdpa()(q, repeat_kv(k[:, :2]).sin(), repeat_kv(v[:, :2])),
    "over the batch": lambda q, k, v: sdpa()(q, k[:1].expand_as(k), v[:1].expand_as(v)),
}


@pytest.mark.parametrize("name", KEPT_REPEATED)
def test_other_repetitions_stay(name):
    operands = qkv(h=4)
    gm = traced(trace_joint, KEPT_REPEATED[name], *operands)
    inputs = [t.detach() for t in operands]
    tangent = torch.randn(KEPT_REPEATED[name](*inputs).shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    rewritten(gm)
    assert head_counts(gm) == [(8, 8, 8)]
    torch.testing.assert_close(gm(inputs, [tangent]), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["causal", "dead", "decode", "gpt2", "three dimensions", "shared, with a mask"])
def test_inference_stays(case):
    fn, operands, masks = CASES[case]
    inputs = [t.detach() for t in (*operands, *masks)]
    gm = traced(trace_inference, fn, *inputs)
    before = gm(*inputs)[0]
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        assert rewritten(gm_of_block, block).rewritten == 1
        torch.testing.assert_close(gm_of_block(*inputs)[0], before, rtol=1e-12, atol=1e-12)


def test_rows_without_keys_are_what_they_were():
    dead = torch.where(DEAD, torch.zeros((), dtype=F64), -INF)
    for fn, expected in ((sdpa(), 0.0), (by_hand(lambda s, m: s + m), math.nan)):
        inputs = [*(t.detach() for t in qkv()), dead]
        gm = traced(trace_inference, fn, *inputs)
        assert rewritten(gm).rewritten == 1
        torch.testing.assert_close(gm(*inputs)[0][1], torch.full_like(gm(*inputs)[0][1], expected), equal_nan=True)


def test_a_graph_of_causal_attention():
    gm = traced(trace_joint, sdpa(is_causal=True), *qkv(dtype=torch.float32))
    rewritten(gm)
    assert_expected_inline(
        graph_text(gm),
        """\
primals_1: f32[2, 2, 6, 4] = input
primals_2: f32[2, 2, 6, 4] = input
primals_3: f32[2, 2, 6, 4] = input
tangents_1: f32[2, 2, 6, 4] = input
transpose: f32[2, 2, 4, 6] = aten.transpose.int(primals_2, -2, -1)
expand_3: f32[2, 2, 6, 4] = aten.expand.default(primals_3, [2, 2, 6, 4])
view_4: f32[4, 6, 4] = aten.view.default(expand_3, [4, 6, 4])
expand_default: f32[2, 2, 6, 4] = aten.expand.default(primals_1, [2, 2, 6, 4])
view_default: f32[4, 6, 4] = aten.view.default(expand_default, [4, 6, 4])
expand_default_1: f32[2, 2, 4, 6] = aten.expand.default(transpose, [2, 2, 4, 6])
view_default_1: f32[4, 4, 6] = aten.view.default(expand_default_1, [4, 4, 6])
attention_train_default = kp.attention_train.default(view_default, view_default_1, view_4, [], [], (), 0.5, True, False, 512)
getitem: f32[4, 6, 4] = <built-in function getitem>(attention_train_default, 0)
getitem_1: f32[2, 4, 6] = <built-in function getitem>(attention_train_default, 1)
view_5: f32[2, 2, 6, 4] = aten.view.default(getitem, [2, 2, 6, 4])
view_6: f32[4, 6, 4] = aten.view.default(tangents_1, [4, 6, 4])
attention_backward_default = kp.attention_backward.default(view_6, view_default, view_default_1, view_4, getitem, getitem_1, [], [], (), 0.5, True, False, 512, 0.7071067811865475, 0.7071067811865475)
getitem_2: f32[4, 6, 4] = <built-in function getitem>(attention_backward_default, 0)
getitem_3: f32[4, 4, 6] = <built-in function getitem>(attention_backward_default, 1)
getitem_4: f32[4, 6, 4] = <built-in function getitem>(attention_backward_default, 2)
view_7: f32[2, 2, 6, 4] = aten.view.default(getitem_4, [2, 2, 6, 4])
view_10: f32[2, 2, 4, 6] = aten.view.default(getitem_3, [2, 2, 4, 6])
view_11: f32[2, 2, 6, 4] = aten.view.default(getitem_2, [2, 2, 6, 4])
mul_2: f32[2, 2, 4, 6] = aten.mul.Scalar(view_10, 0.7071067811865476)
transpose_5: f32[2, 2, 6, 4] = aten.transpose.int(mul_2, -2, -1)
mul_3: f32[2, 2, 6, 4] = aten.mul.Scalar(view_11, 0.7071067811865476)
return [view_5, mul_3, transpose_5, view_7]""",  # noqa: E501
    )


def is_called_causal(fn: Callable, *args: Tensor) -> bool:
    gm = traced(trace_inference, fn, *(t.detach() for t in args))
    assert rewritten(gm).rewritten == 1
    attention = next(n for n in gm.graph.nodes if n.target in OURS)
    return bool(attention.args[7])


def only_the_first_is_causal(size: tuple[int, ...]) -> Tensor:
    return torch.ones(size, dtype=torch.bool).tril() | (torch.arange(size[0]) > 0)[:, None, None, None]


def test_causal_is_what_was_computed_to_be():
    assert is_called_causal(sdpa(is_causal=True), *qkv())
    assert is_called_causal(CASES["causal by hand"][0], *qkv())
    assert is_called_causal(lambda q, k, v: sdpa()(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril()), *qkv())
    assert not is_called_causal(lambda q, k, v: sdpa()(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril(1)), *qkv())
    size = (qkv()[0].shape[0], 1, 6, 6)
    assert is_called_causal(lambda q, k, v: sdpa()(q, k, v, torch.ones(size, dtype=torch.bool).tril()), *qkv())
    assert not is_called_causal(lambda q, k, v: sdpa()(q, k, v, only_the_first_is_causal(size)), *qkv())
    # An input that happens to be causal may be another one at the next call.
    assert not is_called_causal(sdpa(), *qkv(), torch.ones(6, 6, dtype=torch.bool).tril())


@pytest.mark.parametrize("blocks", ["on", "off"])
def test_a_mask_of_a_user_s_operator_is_computed_at_each_call(blocks):
    """It may read anything; here it reads a variable."""
    keeps_all = False

    @torch.library.custom_op("test_rewrite_attention::mask", mutates_args=())
    def mask(size: int) -> Tensor:
        ones = torch.ones(size, size, dtype=torch.bool)
        return ones if keeps_all else ones.tril()

    mask.register_fake(lambda size: torch.ones(size, size, dtype=torch.bool))

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = mask(q.shape[-2])
        for _ in range(3):
            q = torch.tanh(F.scaled_dot_product_attention(q @ q.new_ones(q.shape[-1], q.shape[-1]), k, v, kept))
        return q

    compiled = torch.compile(layers, backend="kp_tpu", options={"precision": "float32", "blocks": blocks})
    inputs = [t.detach() for t in qkv()]
    for keeps_all in (False, True):  # noqa: B007 - the operator reads it
        torch.testing.assert_close(compiled(*inputs), layers(*inputs), rtol=1e-4, atol=1e-5)


def test_a_mask_of_ones_goes():
    gm = traced(trace_inference, lambda q, k, v: sdpa()(q, k, v, torch.ones(6, 6, dtype=torch.bool)), *qkv())
    rewritten(gm)
    attention = next(n for n in gm.graph.nodes if n.target in OURS)
    assert attention.args[3] == []


def weights_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.transpose(2, 3)).softmax(-1)
    return weights @ v, weights


def weights_of(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3)).softmax(-1)


def dropped_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(F.dropout(weights_of(q, k), 0.3), 0.3) @ v


def mask_too(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dropped, mask = torch.native_dropout(weights_of(q, k), 0.3, True)
    return dropped @ v, mask


def dropped_by_another_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weights_of(q, k)
    return weights * torch.where(torch.rand_like(weights) >= 0.3, 1.5, 0.0) @ v


def dropped_by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = weights_of(q, k)
    return weights * torch.where(torch.rand_like(weights[..., :1]) >= 0.3, 1 / 0.7, 0.0) @ v


def a_mask_used_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    dropped, mask = torch.native_dropout(weights_of(q, k), 0.3, True)
    return dropped @ v + mask.sum()


class _DropsInForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weights: Tensor) -> Tensor:
        return F.dropout(weights, 0.3)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def another_dropout_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _DropsInForwardOnly.apply(weights_of(q, k)) @ v


class _TransposesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.transpose(-1, -2).clone()


def transposed_gradient_of_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _TransposesInBackward.apply(weights_of(q, k)) @ v


def transposed_gradient_of_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _TransposesInBackward.apply(q @ k.transpose(2, 3)).softmax(-1) @ v


class _DropsTransposedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor) -> Tensor:
        mask = torch.rand_like(weights) >= 0.3
        ctx.save_for_backward(mask)
        return weights * torch.where(mask, 1 / 0.7, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.saved_tensors[0].transpose(-1, -2).to(grad.dtype) * (1 / 0.7))


def transposed_mask_in_backward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _DropsTransposedInBackward.apply(weights_of(q, k)) @ v


def another_mask_in_backward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    class Masks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Tensor) -> Tensor:
            return torch.where(mask, scores, -9.0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.where(mask.t(), grad, 0.0)

    return Masks.apply(q @ k.transpose(2, 3)).softmax(-1) @ v


def test_a_mask_that_the_backward_transposes_is_another_mask():
    gm = traced(trace_joint, another_mask_in_backward, *qkv(), BIAS[0, 0] > 0)
    assert ["has other masks" in why for _, why in rewritten(gm).refused] == [True]


DROPOUTS: dict[str, Callable] = {
    "sdpa": sdpa(dropout_p=0.3),
    "causal": sdpa(dropout_p=0.3, is_causal=True),
    "masked": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.arange(6) < 4, 0.3),
    "by hand": lambda q, k, v: F.dropout(weights_of(q, k), 0.3) @ v,
    "cast": lambda q, k, v: F.dropout(weights_of(q, k).to(q.dtype), 0.3).clone().to(v.dtype) @ v,
    "three dimensions": lambda q, k, v: F.dropout((q[0] @ k[0].mT).softmax(-1), 0.3) @ v[0],
}


@pytest.mark.quick("2-causal", "2-masked", "2-three dimensions", "512-sdpa", "512-cast")
@pytest.mark.parametrize("case", DROPOUTS)
@pytest.mark.parametrize("block", [2, 512])
def test_dropout_draws_a_key(case, block):
    """The graph draws four numbers, and values and gradients are those of their mask."""
    operands = qkv()
    gm = traced(trace_joint, DROPOUTS[case], *operands)
    assert (rewritten(gm, block).rewritten, gm.graph.find_nodes(op="call_function", target=aten.rand_like.default)) == (
        1,
        [],
    )
    inputs = [t.detach() for t in operands]
    torch.manual_seed(0)
    key = torch.rand(KEY_SIZE)
    size = 2 if case == "three dimensions" else 4
    mask = Dropout(key, 0.3).kept(size, 0, 6, 6).view(-1, 2, 6, 6)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * (1.0 if case in ("by hand", "cast", "three dimensions") else 0.5)
        if case == "causal":
            scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -INF)
        if case == "masked":
            scores = scores.masked_fill(torch.arange(6) >= 4, -INF)
        result = (scores.softmax(-1) * mask / 0.7) @ v
        return result[0] if case == "three dimensions" else result

    result = expected(*operands)
    tangent = torch.randn(result.shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    wanted = [result, *torch.autograd.grad(result, operands, tangent)]
    torch.manual_seed(0)
    found = pytree.tree_leaves(gm(inputs, [tangent]))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (dropped_twice, "its probabilities pass through aten.mul.Tensor"),
        (mask_too, "is an output of the graph"),
        (dropped_by_another_factor, "its probabilities pass through aten.mul.Tensor"),
        (dropped_by_row, "its probabilities pass through aten.mul.Tensor"),
        (a_mask_used_twice, "also reads"),
        (transposed_gradient_of_weights, "permutes its queries or keys"),
        (transposed_gradient_of_scores, "permutes its queries or keys"),
        (weights_too, "is an output of the graph"),
        (by_hand(lambda s: (s / 9).tanh() * -9), "its scores pass through aten.tanh.default"),
        (by_hand(lambda s: s.tanh().tanh()), "its scores pass through aten.tanh.default"),
        (by_hand(lambda s: (s + torch.arange(6, dtype=F64)).tanh()), "masks the scores before their soft cap"),
        (by_hand(lambda s: s.sigmoid()), "its scores pass through aten.sigmoid.default"),
        (by_hand(lambda s: (s + 1.5) * 2), "its scores pass through aten.add.Tensor"),
        (by_hand(lambda s: (s + torch.ones(6, 6).cumsum(0)) * 2), "masks the scores before they are scaled"),
        (by_hand(lambda s: s / 1e-9), "its scores are multiplied by 1e+09. Allowed: at most 1000"),
    ],
)
def test_what_is_refused(fn, reason):
    gm = traced(trace_joint, fn, *qkv())
    text = graph_text(gm)
    report = rewritten(gm)
    assert report.rewritten == 0
    assert [reason in why for _, why in report.refused] == [True]
    assert graph_text(gm) == text


@pytest.mark.parametrize("fn", [another_dropout_backward, transposed_mask_in_backward])
def test_the_dropout_of_a_refused_attention_is_drawn_by_a_key(fn):
    """The graph without gradients, of the same function, has an attention with this mask."""
    gm = traced(trace_joint, fn, *qkv())
    report = rewritten(gm)
    assert report.rewritten == 1
    assert [why for _, why in report.refused] == [
        "the gradient of its probabilities has another dropout than the probabilities"
    ]
    random = [n for n in gm.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
    assert [tuple(node.meta["val"].shape) for node in random if node.users] == [(4,)]
    (mask,) = gm.graph.find_nodes(op="call_function", target=torch.ops.kp.dropout_mask.default)
    assert mask.args[2] == list(mask.meta["val"].shape)


def test_factors_of_queries_and_keys_that_make_a_large_one_are_not_all_taken():
    inputs = [x.float().detach() for x in qkv()]
    gm = traced(trace_inference, lambda q, k, v: by_hand(lambda s: s * 900.0)(q * 800.0, k * 700.0, v), *inputs)
    assert rewritten(gm).rewritten == 1
    call = next(n for n in gm.graph.nodes if n.target in OURS)
    assert max(abs(a) for a in call.args if isinstance(a, float)) <= 1000
    torch.testing.assert_close(
        gm(*inputs)[0], by_hand(lambda s: s * 900.0)(inputs[0] * 800.0, inputs[1] * 700.0, inputs[2])
    )


@pytest.mark.parametrize("sizes", [{"s": 0}, {"t": 0}, {"b": 0}])
def test_empty_attention_is_left_alone(sizes):
    gm = traced(trace_inference, sdpa(), *(x.detach() for x in qkv(**sizes)))
    assert ["a size is 0" in why for _, why in rewritten(gm).refused] == [True]


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: (q @ k.transpose(2, 3)).softmax(-1),  # no second product
        lambda q, k, v: q.softmax(-1) @ k.transpose(2, 3),  # no first one
        lambda q, k, v: (q @ k.transpose(2, 3)).relu() @ v,
    ],
)
def test_what_is_no_attention_is_let_be(fn):
    report = rewritten(traced(trace_joint, fn, *qkv()))
    assert (report.rewritten, report.refused) == (0, ())


def test_a_second_run_changes_nothing():
    gm = traced(trace_joint, sdpa(is_causal=True), *qkv())
    rewritten(gm)
    text = graph_text(gm)
    assert rewritten(gm).rewritten == 0
    assert graph_text(gm) == text


def test_only_some_gradients_are_asked_for():
    q, k, v = qkv()
    for frozen in ((q,), (k,), (v,), (q, k), (k, v)):
        operands = [t.detach() if any(t is f for f in frozen) else t for t in (q, k, v)]
        gm = traced(trace_joint, sdpa(is_causal=True), *operands)
        inputs, tangent = [t.detach() for t in operands], torch.ones(2, 2, 6, 4, dtype=F64)
        before = gm(inputs, [tangent])
        assert rewritten(gm).rewritten == 1
        torch.testing.assert_close(gm(inputs, [tangent]), before, rtol=1e-12, atol=1e-12)


def triangle(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


# What models do to scores, by the name of the mask and of what is left where it drops: left padding leaves the first
# queries of the second sequence no key at all.
LEFT = torch.arange(6) >= torch.tensor([0, 3])[:, None, None, None]
LEAST = torch.finfo(torch.float32).min
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal +min": lambda s, m: s + torch.zeros(6, 6, dtype=s.dtype).masked_fill(~triangle(s), LEAST),
    "causal +-inf": lambda s, m: s + torch.full((6, 6), -INF).triu(1),
    "causal min": lambda s, m: s.masked_fill(~triangle(s), LEAST),
    "causal -inf": lambda s, m: s.masked_fill(~triangle(s), -INF),
    "causal -1e9": lambda s, m: torch.where(triangle(s), s, -1e9),
    "padding +min": lambda s, m: s + (~m).to(s.dtype) * LEAST,
    "padding +-inf": lambda s, m: s + torch.zeros(m.shape).masked_fill(~m, -INF),
    "padding min": lambda s, m: s.masked_fill(~m, LEAST),
    "padding -inf": lambda s, m: s.masked_fill(~m, -INF),
    "padding -1e4": lambda s, m: torch.where(m, s, -1e4),
}
PAIRS = [
    (a, b) for causal in MASKS for padding in MASKS
    if causal.startswith("causal") and padding.startswith("padding") for a, b in ((causal, padding), (padding, causal))
]  # fmt: skip


@pytest.mark.quick(
    "causal +min then padding +min", "padding +-inf then causal +-inf", "causal min then padding min",
    "padding -inf then causal -inf", "causal -1e9 then padding -1e4", "padding +min then causal +-inf",
    "causal +-inf then padding min", "padding min then causal +min", "causal -inf then padding +min",
    "padding -1e4 then causal -inf", "causal -1e9 then padding +-inf", "padding -inf then causal -1e9",
)  # fmt: skip
@pytest.mark.parametrize("pair", PAIRS, ids=" then ".join)
def test_rows_that_two_masks_together_leave_no_key_are_eager_s(pair):
    """Their NaN too, and where it stops: in what a mask has replaced, no gradient goes to the scores."""

    def change(scores: Tensor, kept: Tensor) -> Tensor:
        return MASKS[pair[1]](MASKS[pair[0]](scores, kept), kept)

    operands = qkv(dtype=torch.float32)
    gm = traced(trace_joint, by_hand(change), *operands, LEFT)
    inputs = [t.detach() for t in (*operands, LEFT)]
    tangent = torch.randn(2, 6, 2, 4, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        assert rewritten(gm_of_block, block).rewritten == 1
        # sums of nine products of float32 in another order
        torch.testing.assert_close(gm_of_block(inputs, [tangent]), before, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_no_mask_is_causal_beside_one_that_may_leave_a_row_nothing():
    masked = MASKS["causal +min"]
    assert is_called_causal(by_hand(lambda s: masked(s, s)), *qkv())
    assert is_called_causal(by_hand(lambda s: masked(masked(s, s), s)), *qkv())
    assert is_called_causal(by_hand(alibi), *qkv())
    assert is_called_causal(by_hand(lambda s: masked(s + torch.zeros(6, 6), s)), *qkv())
    assert not is_called_causal(by_hand(lambda s, m: masked(s + m, s)), *qkv(), BIAS)
    # Constants: key 0 goes as well; a bias is as good as a mask; a later mask puts dropped scores back.
    assert not is_called_causal(by_hand(lambda s: masked(s.masked_fill((torch.arange(6) < 1), LEAST), s)), *qkv())
    assert not is_called_causal(by_hand(lambda s: masked(s + torch.full((6,), -1e36), s)), *qkv())
    assert not is_called_causal(by_hand(lambda s: masked(s, s).masked_fill(~(torch.arange(6) < 1), -9.0)), *qkv())


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "integer factor": lambda s: s * torch.full((), 2.7, dtype=torch.int64),
    "boolean factor": lambda s: s * torch.full((), 2.7, dtype=torch.bool),
    "integer divisor": lambda s: s / torch.full((), 3.9, dtype=torch.int32),
    "narrow factor": lambda s: s * torch.full((), 0.7, dtype=torch.bfloat16),
    "wide factor": lambda s: s * torch.full((), 0.7, dtype=F64),
    "narrow fill": lambda s: torch.where(triangle(s), s, torch.full((), 0.7, dtype=torch.bfloat16)),
    "integer fill": lambda s: torch.where(triangle(s), s, torch.full((), -2.7, dtype=torch.int64)),
    "fill times factor": lambda s: torch.where(triangle(s), s, LEAST) * 4,
    "boolean addend": lambda s: s + triangle(s),
    "integer addend": lambda s: s + torch.arange(6),
}


@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
def test_a_number_counts_as_its_dtype_holds_it(change):
    operands = qkv(dtype=torch.float32)
    gm = traced(trace_joint, by_hand(change), *operands)
    inputs, tangent = [t.detach() for t in operands], torch.ones(2, 6, 2, 4)
    before = gm(inputs, [tangent])
    assert rewritten(gm).rewritten == 1
    torch.testing.assert_close(gm(inputs, [tangent]), before, rtol=1e-5, atol=1e-5)


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "booleans": lambda s, a, b: s + ((a > 0)[:, None] + (b > 0)),
    "bytes": lambda s, a, b: s + ((a * 200).byte()[:, None] + (b * 200).byte()),
    "integers and floats": lambda s, a, b: s + (a.long()[:, None] + b * 0.5),
    "terms that cancel": lambda s, a, b: s + ((-1e6 - b)[:, None] + (b + 1e6)),
}


@pytest.mark.parametrize("change", SUMS.values(), ids=SUMS)
def test_the_terms_of_a_mask_are_added_as_in_eager(change):
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    inputs = q, k, v, torch.tensor([1.0, 0, 1, 0, 1, 0]), torch.tensor([1.0, 1, 0, 0, 0.5, 1])
    gm = traced(trace_inference, lambda q, k, v, a, b: by_hand(lambda s: change(s, a, b))(q, k, v), *inputs)
    before = gm(*inputs)[0]
    assert rewritten(gm).rewritten == 1
    torch.testing.assert_close(gm(*inputs)[0], before, rtol=1e-5, atol=1e-5)


def test_numbers_of_queries_count_as_their_dtype_holds_them():
    operands = qkv()
    fn = lambda q, k, v: sdpa()(q * torch.full((), 2.7, dtype=torch.int64), k, v)  # noqa: E731
    inputs = [t.detach() for t in operands]
    gm = traced(trace_inference, fn, *inputs)
    before = gm(*inputs)[0]
    assert rewritten(gm).rewritten == 1
    torch.testing.assert_close(gm(*inputs)[0], before, rtol=1e-12, atol=1e-12)


def test_a_factor_that_repeats_its_operand_is_none():
    q, k, v = (t.detach() for t in qkv())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q[:, :1] * torch.full((2, 1, 1), 2.0, dtype=F64)) @ k.mT).softmax(-1) @ v

    gm = traced(trace_inference, attend, q, k, v)
    before = gm(q, k, v)[0]
    assert rewritten(gm).rewritten == 1
    torch.testing.assert_close(gm(q, k, v)[0], before, rtol=1e-12, atol=1e-12)


def test_scores_that_a_mask_widens_are_refused():
    mask = torch.where(LEFT, torch.zeros((), dtype=F64), torch.finfo(F64).min)
    gm = traced(
        trace_inference,
        lambda q, k, v, m: (q @ k.mT + m).softmax(-1).float() @ v,
        *(t.detach() for t in qkv(dtype=torch.float32)),
        mask,
    )
    assert ["upcasts its scores to torch.float64" in why for _, why in rewritten(gm).refused] == [True]


def test_only_a_rule_over_keys_makes_rows_zero():
    def columns(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = (q @ k.mT).masked_fill(~m, -INF)
        weights = scores.softmax(-1)
        return torch.where((scores == -INF).all(-2, keepdim=True), torch.zeros_like(weights), weights) @ v

    inputs = [*(t.detach() for t in qkv()), torch.arange(36).view(6, 6) % 6 != 0]
    gm = traced(trace_inference, columns, *inputs)
    before = gm(*inputs)[0]
    rewritten(gm)
    torch.testing.assert_close(gm(*inputs)[0], before, rtol=1e-12, atol=1e-12)


class MaskedForwardOnly(torch.autograd.Function):
    """A softmax whose backward masks by another mask than its forward, with all else as autograd has it."""

    @staticmethod
    def forward(ctx, scores: Tensor, kept: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return scores.masked_fill(~kept, -9.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (other,) = ctx.saved_tensors
        return grad.masked_fill(~other, 0.0), None, None


def test_a_backward_that_masks_otherwise_is_refused():
    gm = traced(trace_joint, by_hand(MaskedForwardOnly.apply), *qkv(), KEYS, KEYS.flip(0))
    assert ["has other masks or another scale" in why for _, why in rewritten(gm).refused] == [True]
