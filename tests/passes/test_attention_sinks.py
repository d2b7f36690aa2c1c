"""RewriteAttention on attention with sinks: a score for each row that is dropped after the softmax, as in GPT-OSS."""

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kp_dynamo.ops.dropout_mask import KEY_SIZE, Dropout
from kp_dynamo.telemetry import snapshot
from tests.graphs import graph_text, trace_inference, trace_joint
from tests.passes.test_rewrite_attention import F64, KEYS, LEAST, MIN, OURS, qkv, repeat_kv, rewritten, traced

aten, kp = torch.ops.aten, torch.ops.kp
B, H, S = 2, 4, 6


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor, rate: float = 0.0) -> Tensor:
    """`eager_attention_forward` of transformers' GPT-OSS."""
    k, v = repeat_kv(k[:, :2]), repeat_kv(v[:, :2])
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    sinks = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    combined = torch.cat([scores, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    probabilities = F.softmax(combined, dim=-1, dtype=combined.dtype)
    weights = F.dropout(probabilities[..., :-1], rate, training=rate > 0)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def plain(scores: Callable, first: Callable = lambda s: s) -> Callable:
    """Sinks without the subtraction, with what happens to the scores before, and to the sinks."""

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
        part = scores(q @ k.mT, mask)
        combined = torch.cat([part, first(sinks).expand(*part.shape[:-1], 1)], -1)
        return combined.softmax(-1)[..., :-1] @ v

    return attend


def causal(dtype: torch.dtype = F64) -> Tensor:
    return torch.zeros(S, S, dtype=dtype).masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), MIN)[None, None]


PADDING = torch.zeros(B, 1, 1, S, dtype=F64).masked_fill(~KEYS, MIN)
DEAD = torch.where(torch.arange(S) < torch.tensor([S, 0])[:, None, None, None], 0.0, -math.inf).to(F64)
CASES: dict[str, tuple[Callable, tuple[int, ...], Tensor]] = {
    "gpt-oss": (gpt_oss, (H,), causal()),
    "gpt-oss, padding": (gpt_oss, (H,), PADDING),
    "gpt-oss, rows without keys": (gpt_oss, (H,), DEAD),
    "without a subtraction": (plain(lambda s, m: s + m, lambda x: x.view(1, H, 1, 1)), (H,), PADDING),
    "without a mask": (plain(lambda s, m: s * 0.5, lambda x: x.view(1, H, 1, 1)), (H,), PADDING),
    "a soft cap": (plain(lambda s, m: (s / 2).tanh() * 2 + m, lambda x: x.view(1, H, 1, 1)), (H,), PADDING),
    "one for all": (plain(lambda s, m: s), (1,), PADDING),
    "one for each row": (plain(lambda s, m: s.masked_fill(m < 0, -9.0)), (B, H, S, 1), PADDING),
    "one for each sequence": (plain(lambda s, m: s + m), (B, 1, 1, 1), PADDING),
}


def case_of(name: str) -> tuple[Callable, list[Tensor]]:
    fn, shape, mask = CASES[name]
    sinks = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    return fn, [*qkv(h=H), sinks, mask]


@pytest.mark.quick(
    "gpt-oss, padding", "gpt-oss, rows without keys", "a soft cap", "one for each row", "one for each sequence",
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_stay(name):
    fn, operands = case_of(name)
    gm = traced(trace_joint, fn, *operands)
    inputs = [t.detach() for t in operands]
    tangent = torch.randn(fn(*inputs).shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        report = rewritten(gm_of_block, block)
        assert (report.rewritten, report.refused) == (1, ())
        assert not [n for n in gm_of_block.graph.nodes if n.target in (aten.bmm.default, aten._softmax.default)]
        # sums of seven products in another order
        torch.testing.assert_close(gm_of_block(inputs, [tangent]), before, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss, rows without keys", "one for each row"])
def test_inference_stays(name):
    fn, operands = case_of(name)
    inputs = [t.detach() for t in operands]
    gm = traced(trace_inference, fn, *inputs)
    before = gm(*inputs)[0]
    for block in (2, 512):
        gm_of_block = copy.deepcopy(gm)
        assert rewritten(gm_of_block, block).rewritten == 1
        torch.testing.assert_close(gm_of_block(*inputs)[0], before, rtol=1e-12, atol=1e-12)


def test_the_operator_of_gpt_oss():
    *others, _ = (t.detach() for t in case_of("gpt-oss")[1])
    gm = traced(trace_inference, gpt_oss, *(t.float() for t in others), torch.zeros(B, 1, 1, S))
    rewritten(gm)
    sinks, call = [line for line in graph_text(gm).splitlines() if line.startswith(("view_3", "attention"))]
    assert sinks == "view_3: f32[1, 4, 1, 1] = aten.view.default(arg3_1, [1, -1, 1, 1])"
    assert (
        call.split("reshape_default_3, ")[1]
        == "[arg4_1], [0.0], (2, 4), 0.3, False, False, 256, None, 0.0, 0.0, view_3)"
    )


def test_shared_keys_are_not_repeated_and_a_constant_mask_is_causal():
    _, (q, k, v, sinks, _) = case_of("gpt-oss")
    gm = traced(trace_joint, lambda q, k, v, s: gpt_oss(q, k, v, s, causal()), q, k, v, sinks)
    rewritten(gm)
    call = next(n for n in gm.graph.nodes if n.target in OURS)
    assert [call.args[i].meta["val"].shape[0] for i in range(3)] == [8, 4, 4]
    assert (call.args[3], call.args[7]) == ([], True)


def test_dropout_leaves_the_sinks_in_the_sum():
    _, operands = case_of("gpt-oss")
    gm = traced(trace_joint, lambda *a: gpt_oss(*a, rate=0.3), *operands)
    assert rewritten(gm).rewritten == 1
    inputs = [t.detach() for t in operands]
    torch.manual_seed(0)
    mask = Dropout(torch.rand(KEY_SIZE), 0.3).kept(B * H, 0, S, S).view(B, H, S, S)
    q, k, v, sinks, added = operands
    scores = q @ repeat_kv(k[:, :2]).mT * 0.3 + added
    weights = torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, S, 1)], -1).softmax(-1)[..., :-1]
    result = ((weights * mask / 0.7) @ repeat_kv(v[:, :2])).transpose(1, 2)
    tangent = torch.randn(result.shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(result, operands[:4], tangent)
    torch.manual_seed(0)
    (found,), gradients = gm(inputs, [tangent])
    torch.testing.assert_close(found, result.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[:4], list(wanted), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("frozen", [(0, 1), (2,), (3,), (0, 1, 2)])
def test_only_some_gradients_are_asked_for(frozen):
    fn, operands = case_of("gpt-oss, padding")
    operands = [t.detach() if i in frozen else t for i, t in enumerate(operands)]
    gm = traced(trace_joint, fn, *operands)
    inputs = [t.detach() for t in operands]
    tangent = torch.randn(fn(*inputs).shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    report = rewritten(gm)
    # Gradients of the sinks alone, without those of scores, are as they were.
    assert report.rewritten == (0 if {0, 1} <= set(frozen) else 1), report.refused
    torch.testing.assert_close(gm(inputs, [tangent]), before, rtol=1e-11, atol=1e-12)


def two_columns(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, S, 2)], -1).softmax(-1)[..., :-2] @ v


def sinks_first(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.cat([sinks.view(1, H, 1, 1).expand(B, H, S, 1), scores], -1).softmax(-1)[..., 1:] @ v


def another_column(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.cat([scores, sinks.view(1, H, 1, 1).expand(B, H, S, 1)], -1).softmax(-1)[..., 1:] @ v


def read_twice(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    weights = torch.cat([q @ k.mT, sinks.view(1, H, 1, 1).expand(B, H, S, 1)], -1).softmax(-1)
    return weights[..., :-1] @ v + weights[..., -1:]


def and_a_bias(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    return plain(lambda s, m: s + sinks.view(1, H, 1, 1).expand(1, H, S, S), lambda x: x.view(1, H, 1, 1))(
        q, k, v, sinks, mask
    )


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (two_columns, "pass through aten.slice.Tensor"),
        (sinks_first, "pass through aten.slice.Tensor"),
        (another_column, "pass through aten.slice.Tensor"),
        (read_twice, "also reads"),
        (and_a_bias, "both its sinks and a bias have a gradient"),
    ],
)
def test_what_is_refused(fn, reason):
    _, operands = case_of("gpt-oss")
    gm = traced(trace_joint, fn, *operands)
    text = graph_text(gm)
    report = rewritten(gm)
    assert report.rewritten == 0
    assert [reason in why for _, why in report.refused] == [True], report.refused
    assert graph_text(gm) == text


def transformers_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=True)
    return eager_attention_forward(module, q, k, v, mask, scaling=0.5, dropout=0.0)[0]


@pytest.mark.quick("balanced")
@pytest.mark.parametrize("level", ["float32", "balanced"])
def test_the_attention_of_transformers_through_the_backend(level):
    """Two lengths, one after the other; the weights that it returns are dropped."""
    options = {"precision": "float32"} if level == "float32" else {"level": level}
    step = torch.compile(transformers_attention, backend="kp_tpu", options=options)
    before = len(snapshot()["passes"])
    for length in (6, 9):
        q, k, v = qkv(h=4, s=length, t=length, dtype=torch.float32)
        k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
        sinks = torch.linspace(-1, 1, 4).requires_grad_()
        mask = torch.zeros(length, length).masked_fill(~torch.ones(length, length).tril().bool(), LEAST)[None, None]
        operands = (q, k, v, sinks)
        found = step(*operands, mask)
        tangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
        gradients = torch.autograd.grad(found, operands, tangent)
        exact = [x.detach().double().requires_grad_() for x in operands]
        expected = transformers_attention(*exact, mask.double())
        wanted = torch.autograd.grad(expected, exact, tangent.double())
        # bfloat16 rounds operands, weights and gradients of scores by 2 ** -9 each.
        tolerance = 1e-5 if level == "float32" else 2.0**-6
        for one, other in zip((found, *gradients), (expected, *wanted), strict=True):
            assert (one.double() - other).norm() <= tolerance * other.norm()
    passes = [p for p in snapshot()["passes"][before:] if p["name"] == "rewrite_attention"]
    assert {p["rewritten"] for p in passes} == {1}, passes
