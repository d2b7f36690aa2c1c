"""`kp::attention`, `kp::attention_train` and its backward: on XLA as on the CPU, their errors, and what they refuse.

N, S, T, D, E: batch x heads, queries, keys, widths of queries and of values.
"""

import re

import pytest
import torch
import torch_xla
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import kp_dynamo.ops  # noqa: F401  # registers the operators
from kp_dynamo.ops.attention_scoring import Scoring
from kp_dynamo.ops.dropout_mask import Dropout

kp = torch.ops.kp
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
N, S, T, D, E = 4, 8, 10, 4, 6


def operands(dtype: torch.dtype = F32) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, S, D), (N, D, T), (N, T, E), (N, S, E))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


KEPT = torch.arange(T) < torch.tensor([T, 0])[:, None, None, None]  # nothing is left for the second half of N
MASKED = ([KEPT], [-torch.inf], [2, 2], 0.5, False, True, 3)
CAUSAL = ([], [], [], 0.5, True, False, 3)


def results(scoring: tuple, *tensors: Tensor) -> list[Tensor]:
    q, k, v, grad = tensors
    forward = kp.attention_train(q, k, v, *scoring)
    return [
        kp.attention(q, k, v, *scoring),
        *forward,
        *kp.attention_backward(grad, q, k, v, *forward, *scoring, 0.5, 0.5),
    ]


KEY = torch.tensor([0.1, 0.7, 0.3, 0.9])


@pytest.mark.parametrize("scoring", [MASKED, CAUSAL, (*CAUSAL[:4], False, False, 512)])
def test_dropout_is_that_of_the_probabilities(scoring):
    """Values and gradients of softmax(scores) * mask / 0.7 @ v, by autograd."""
    q, k, v, grad = (t.requires_grad_() for t in operands(F64))
    mask = Dropout(KEY, 0.3).kept(N, 0, S, T)
    scores = Scoring(*scoring).scores(q, k, 0)
    weights = scores.softmax(-1)
    weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, weights) * mask / 0.7
    expected = torch.autograd.grad(weights @ v, (q, k, v), grad)
    with torch.no_grad():
        result, statistics = kp.attention_train(q, k, v, *scoring, KEY, 0.3)
        found = kp.attention_backward(grad, q, k, v, result, statistics, *scoring, 0.5, 0.5, KEY, 0.3)
        torch.testing.assert_close(kp.attention(q, k, v, *scoring, KEY, 0.3), weights @ v, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result, weights @ v, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dropout", [(None, 0.0), (KEY, 0.3)])
@pytest.mark.parametrize("scoring", [MASKED, CAUSAL, (*CAUSAL[:4], False, False, 512)])
def test_a_soft_cap_is_that_of_the_scaled_scores(scoring, dropout):
    """Values and gradients, by autograd, of scores that are capped before they are masked."""
    q, k, v, grad = (t.requires_grad_() for t in operands(F64))
    k, v = (t[::2].detach().requires_grad_() for t in (k, v))
    masks, fills, _, scale, is_causal, *_ = scoring
    scores = 0.4 * torch.tanh(q @ k.repeat_interleave(2, 0) * scale / 0.4)
    for mask, fill in zip(masks, fills, strict=True):
        scores = torch.where(mask.expand(2, 2, S, T).flatten(0, 1), scores, fill)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(S, T, dtype=torch.bool).tril(), -torch.inf)
    weights = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, scores.softmax(-1))
    if dropout[1]:
        weights = weights * Dropout(KEY, 0.3).kept(N, 0, S, T) / 0.7
    result = weights @ v.repeat_interleave(2, 0)
    expected = torch.autograd.grad(result, (q, k, v), grad)
    with torch.no_grad():
        forward = kp.attention_train(q, k, v, *scoring, *dropout, 0.4)
        found = kp.attention_backward(grad, q, k, v, *forward, *scoring, scale, scale, *dropout, 0.4)
        torch.testing.assert_close(kp.attention(q, k, v, *scoring, *dropout, 0.4), result, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(forward[0], result, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


BIAS = torch.linspace(-2, 2, 2 * 2 * S * T).view(2, 2, S, T)
OF_ROWS = ([BIAS[0, 0].sin() > -0.5, BIAS.cos()], [-9.0, 0.0], [2, 2], 0.3, False, False, 512)


@pytest.mark.parametrize("dropout", [(), (KEY, 0.3)])
@pytest.mark.parametrize("scoring", [MASKED, CAUSAL, OF_ROWS])
def test_shared_heads_are_as_repeated_ones(scoring, dropout):
    """Values, statistics and gradients; those of keys and values are sums over the heads that share them."""
    q, k, v, grad = operands(F64)
    k, v = k[::2], v[::2]
    whole = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    found = kp.attention_train(q, k, v, *scoring, *dropout)
    expected = kp.attention_train(q, *whole, *scoring, *dropout)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kp.attention(q, k, v, *scoring, *dropout), expected[0], rtol=1e-12, atol=1e-12)
    d_q, *others = kp.attention_backward(grad, q, k, v, *found, *scoring, 0.5, 0.5, *dropout)
    as_repeated = kp.attention_backward(grad, q, *whole, *expected, *scoring, 0.5, 0.5, *dropout)
    summed = [x.unflatten(0, (2, 2)).sum(1) for x in as_repeated[1:]]
    torch.testing.assert_close([d_q, *others], [as_repeated[0], *summed], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_shared", [4, 2])
@pytest.mark.parametrize("dropout", [(), (KEY, 0.3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradient_of_a_bias_is_autograd_s(is_causal, dropout, num_shared):
    q, k, v, grad = operands(F64)
    k, v = k[:num_shared], v[:num_shared]
    bias = torch.randn(2, S, T, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    scoring = ([bias.detach()], [0.0], [2, 2], 0.5, is_causal, False, 3)
    scores = q @ k.repeat_interleave(N // num_shared, 0) * 0.5 + bias.repeat(2, 1, 1)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(S, T, dtype=torch.bool).tril(), -torch.inf)
    weights = scores.softmax(-1) * (Dropout(KEY, 0.3).kept(N, 0, S, T).to(F64) / 0.7 if dropout else 1.0)
    (weights @ v.repeat_interleave(N // num_shared, 0)).backward(grad)
    forward = kp.attention_train(q, k, v, *scoring, *dropout)
    found = kp.attention_backward.bias(grad, q, k, v, *forward, *scoring, 0.5, 0.5, *dropout)
    torch.testing.assert_close(found[3], bias.grad, rtol=1e-12, atol=1e-12)
    others = kp.attention_backward(grad, q, k, v, *forward, *scoring, 0.5, 0.5, *dropout)
    assert all(torch.equal(one, other) for one, other in zip(found, others, strict=False))


@pytest.mark.parametrize("num_shared", [4, 2])
@pytest.mark.parametrize("dropout", [(None, 0.0), (KEY, 0.3)])
@pytest.mark.parametrize("scoring", [MASKED, CAUSAL])
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), (2, 2, S, 1), (1, 1)], ids=str)
def test_sinks_are_one_more_score_of_each_row(shape, scoring, dropout, num_shared):
    """Values and gradients, by autograd, of a softmax whose last probability is dropped."""
    q, k, v, grad = (t.requires_grad_() for t in operands(F64))
    k, v = (t[:num_shared].detach().requires_grad_() for t in (k, v))
    sinks = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    scoring = (*scoring[:2], [2, 2], *scoring[3:])
    scores = Scoring(*scoring).scores(q, k.repeat_interleave(N // num_shared, 0), 0)
    column = sinks.expand(2, 2, S, 1).reshape(N, S, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    if dropout[1]:
        weights = weights * Dropout(KEY, 0.3).kept(N, 0, S, T) / 0.7
    result = weights @ v.repeat_interleave(N // num_shared, 0)
    expected = torch.autograd.grad(result, (q, k, v, column), grad)
    arguments = (*dropout, 0.0, sinks.detach())
    with torch.no_grad():
        forward = kp.attention_train(q, k, v, *scoring, *arguments)
        found = kp.attention_backward.sinks(grad, q, k, v, *forward, *scoring, 0.5, 0.5, *arguments)
        torch.testing.assert_close(kp.attention(q, k, v, *scoring, *arguments), result, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(forward[0], result.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(found), [*expected[:3], expected[3].squeeze(-1)], rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_bias_needs_the_sizes_of_batch_and_heads():
    q, k, v, grad = operands()
    scoring = ([torch.zeros(S, T)], [0.0], [4], 0.5, False, False, 3)
    forward = kp.attention_train(q, k, v, *scoring)
    with pytest.raises(ValueError, match=re.escape("batch_dims=[4] are invalid: must be B and H")):
        kp.attention_backward.bias(grad, q, k, v, *forward, *scoring, 0.5, 0.5)


@pytest.mark.quick("dtype0-scoring0", "dtype1-scoring1")
@pytest.mark.parametrize("scoring", [MASKED, CAUSAL])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_xla_agrees_with_the_cpu(scoring, dtype):
    device = torch_xla.device()
    on_xla = ([mask.to(device) for mask in scoring[0]], *scoring[1:])
    with torch._C._AutoDispatchBelowAutograd():
        found = results(on_xla, *(t.to(device) for t in operands(dtype)))
    for mine, expected in zip(found, results(scoring, *operands(dtype)), strict=True):
        assert mine.device.type == "xla"
        # sums of up to ten products in another order; bfloat16 rounds weights, gradients of scores, and the result
        torch.testing.assert_close(
            mine.cpu(), expected, rtol=8 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps
        )


@pytest.mark.parametrize("dtype", [torch.float16, BF16, F32])
@pytest.mark.parametrize("scale", [0.125, 0.3])
def test_only_a_factor_that_rounds_nothing_is_applied_before_the_matmul(scale, dtype):
    q, k, _, _ = operands(dtype)
    scoring = Scoring((), (), (), scale, is_causal=False, zero_rows=False, block=512)
    graph = make_fx(lambda q, k: scoring.scores(q, k, 0))(q, k).graph
    factors = next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
    product = next(n for n in graph.nodes if n.target is torch.ops.aten.bmm.default)
    assert (factors < product) == (scale == 0.125 and dtype != torch.float16)
    assert torch.equal(scoring.scores(q, k, 0), torch.bmm(q.float(), k.float()) * scale)


def test_a_row_without_keys_is_zero_and_gives_no_gradient():
    result, _, statistics, d_q, d_k, d_v = results(MASKED, *operands(F64))
    assert torch.equal(statistics[1][2:], torch.full((2, S), torch.inf, dtype=F64))
    assert all(torch.equal(x[2:], torch.zeros_like(x[2:])) for x in (result, d_q, d_k, d_v))


def test_bfloat16_errs_less_than_separate_matmuls():
    q, k, v, _ = operands(BF16)
    exact = kp.attention(*(t.double() for t in (q, k, v)), *CAUSAL)
    triangle = torch.ones(S, T, dtype=torch.bool).tril()
    chain = (q @ k * 0.5).masked_fill(~triangle, -torch.inf).softmax(-1) @ v
    # of four roundings (scores, their multiples, weights, result) two are left
    assert (kp.attention(q, k, v, *CAUSAL) - exact).norm() < 0.9 * (chain - exact).norm()


def test_fake_results_are_like_real_ones():
    with torch._subclasses.FakeTensorMode() as mode:
        scoring = ([mode.from_tensor(KEPT)], *MASKED[1:])
        fakes = results(scoring, *(mode.from_tensor(t) for t in operands(BF16)))
    for fake, real in zip(fakes, results(MASKED, *operands(BF16)), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_flops_are_those_of_the_matmuls():
    q, k, v, grad = operands()
    with FlopCounterMode(display=False) as counter:
        forward = kp.attention_train(q, k, v, *CAUSAL)
    assert counter.get_total_flops() == 2 * N * S * T * (D + E)
    with FlopCounterMode(display=False) as counter:
        kp.attention_backward(grad, q, k, v, *forward, *CAUSAL, 0.5, 0.5)
    assert counter.get_total_flops() == 4 * N * S * T * (D + E)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q.double(), k, v, *CAUSAL), "must have the same floating-point dtype"),
        (lambda q, k, v: (q[0], k, v, *CAUSAL), "must have 3 each"),
        (lambda q, k, v: (q[:3], k[:2], v[:2], *CAUSAL), "3 heads of queries, 2 of keys and 2 of values are invalid"),
        (lambda q, k, v: (q, k[:2], v, *CAUSAL), "4 heads of queries, 2 of keys and 4 of values are invalid"),
        (lambda q, k, v: (q, k, v, [KEPT], [], [2, 2], 1.0, False, True, 3), "1 masks need as many fills, got 0"),
        (lambda q, k, v: (q, k, v, *CAUSAL, None, 0.5), "rate=0.5 needs a key, 4 random numbers"),
        (lambda q, k, v: (q, k, v, *CAUSAL, KEY[:2], 0.5), "the key is torch.float32[2], must be float32 [4]"),
        (lambda q, k, v: (q, k, v, *CAUSAL, KEY, 1.0), "rate=1.0 is invalid: it must be at least 0 and less than 1"),
        (lambda q, k, v: (q, k, v, *CAUSAL, None, 0.0, 0.0, KEY), "sinks of the shape [4] are invalid"),
        (lambda q, k, v: (q, k, v, *CAUSAL[:-1], 0), "block=0 is invalid: it must be at least 1"),
    ],
)
def test_invalid_arguments_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        kp.attention(*change(*operands()[:3]))
