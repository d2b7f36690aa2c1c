"""Dropout inside attention: the backward has the mask of the forward, and no two masks are alike.

The values are unit vectors, so that the result is the probabilities after dropout, and shows the mask.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kp_dynamo import explain, mark_sequence
from kp_dynamo.telemetry import snapshot
from tests.spine import DEVICES, compiled

B, H, S, D = 2, 4, 16, 8
RATE = 0.3


def operands(length: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, H, length, D, generator=generator).to(dtype) for _ in range(2))
    return [q, k, torch.eye(length, S, dtype=dtype).expand(B, H, length, S).clone()]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=RATE, is_causal=True)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-1, -2) / D**0.5).softmax(-1)
    return F.dropout(weights, RATE) @ v


def in_a_checkpoint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(by_hand, q, k, v, use_reentrant=False)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / D**0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return (scores.softmax(-1) * mask / (1 - RATE)) @ v


def check(run, inputs, device, *, is_causal, tolerance=1e-5):
    """The result and all gradients are those of the mask that the result shows; returns the mask."""
    mine = [t.to(device).requires_grad_() for t in inputs]
    result = run(*mine)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    found = torch.autograd.grad(result, mine, weights.to(device))
    mask = result.detach().cpu()[..., : inputs[1].shape[2]] != 0
    theirs = [t.double().requires_grad_() for t in inputs]
    expected = exact(*theirs, mask, is_causal=is_causal)
    torch.testing.assert_close(result.detach().cpu().double(), expected.detach(), rtol=tolerance, atol=tolerance)
    for got, wanted in zip(found, torch.autograd.grad(expected, theirs, weights.double()), strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=10 * tolerance, atol=10 * tolerance)
    return mask


@pytest.mark.quick(
    "{}-sdpa-cpu", "{}-by_hand-xla", "{'checkpoint': 'blocks'}-in_a_checkpoint-xla", "{'checkpoint': 0.5}-sdpa-xla",
    "{'donate': 'mutated'}-by_hand-xla", "{'blocks': 'on'}-in_a_checkpoint-xla", "{'blocks': 'on'}-sdpa-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fn", [sdpa, by_hand, in_a_checkpoint])
@pytest.mark.parametrize(
    "options",
    [{}, {"checkpoint": "blocks"}, {"checkpoint": 0.5}, {"donate": "mutated"}, {"blocks": "on"}],
    ids=str,
)
def test_the_backward_has_the_mask_of_the_forward(fn, options, device):
    run = compiled(fn, **options)
    first, second = (check(run, operands(), device, is_causal=fn is sdpa) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.quick("by_hand")
@pytest.mark.parametrize("fn", [sdpa, by_hand])
def test_it_is_rewritten_in_training(fn):
    explanation = explain(fn, *(t.requires_grad_() for t in operands()))
    [rewritten] = [p for p in explanation.passes if p.name == "rewrite_attention"]
    assert (rewritten.rewritten, rewritten.refused) == (1, ())


@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
def test_at_every_level(level):
    check(compiled(by_hand, level=level, precision="bfloat16"), operands(), "xla", is_causal=False, tolerance=2e-2)


@pytest.mark.quick("torch.float16", "torch.float64")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_of_every_dtype(dtype):
    tolerance = 1e-9 if dtype == torch.float64 else 2e-2
    check(compiled(by_hand), operands(dtype=dtype), "xla", is_causal=False, tolerance=tolerance)


def test_at_padded_lengths():
    run, before = compiled(by_hand, buckets=[16, 32]), snapshot()
    for length in (5, 9, 16):
        check(lambda *x: run(*(mark_sequence(t, 2) for t in x)), operands(length), "cpu", is_causal=False)
    assert snapshot()["programs"] - before["programs"] == 2


def test_heads_layers_calls_and_samples_have_masks_of_their_own():
    class Layers(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
            return [by_hand(q, k, v) for _ in range(3)]

    run = compiled(Layers())
    masks = [result != 0 for _ in range(2) for result in run(*operands())]
    heads = torch.stack(masks).view(-1, S * S).double() - (1 - RATE)
    products = heads @ heads.T / (S * S * RATE * (1 - RATE))
    # Of 48 masks of 256 numbers: the largest of a thousand products is about 3.3 deviations of 1 / 16.
    assert (products - torch.eye(len(heads))).abs().max() < 0.35


def test_the_seed_of_the_user_repeats_it():
    run, results = compiled(sdpa), []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        results.append(run(*operands()))
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[1])


def test_without_gradient_it_drops_too():
    with torch.no_grad():
        result = compiled(by_hand)(*operands())
    assert 0.6 < (result != 0).double().mean() < 0.8


def test_evaluation_drops_nothing():
    layer = nn.MultiheadAttention(16, 2, dropout=0.5, batch_first=True).eval()
    x = torch.randn(2, 6, 16)
    torch.testing.assert_close(compiled(layer)(x, x, x, need_weights=False)[0], layer(x, x, x, need_weights=False)[0])
