"""Attention at padded sizes is one operator as at any other, and right: padding full of NaN, both directions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kp_dynamo import mark_sequence
from kp_dynamo.telemetry import snapshot
from tests.spine import compiled, counted

LENGTHS = (21, 5, 9, 30, 16)
BUCKETS = [16, 32]
B, H, D = 2, 3, 4


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")
    torch._dynamo.reset()


def plain(x: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x.cos())


def causal(x: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)


def with_kept_keys(x: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x.cos(), keep[:, None, None, :])


def with_added_mask(x: Tensor, keep: Tensor) -> Tensor:
    """Also in rows: padding of the mask reaches weights, unless it is cleared."""
    mask = torch.where(keep[:, None, None, :], 0.0, -1e9) + torch.where(keep[:, None, :, None], 0.0, 0.5)
    return F.scaled_dot_product_attention(x, x.sin(), x.cos(), mask)


def rows_without_keys(x: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x.cos(), (keep[:, None, None, :] & keep[:, None, :, None]))


def by_hand(x: Tensor, keep: Tensor) -> Tensor:
    scores = (x @ x.sin().mT) / 2
    return scores.masked_fill(~keep[:, None, None, :], torch.finfo(scores.dtype).min).softmax(-1) @ x.cos()


def one_query(x: Tensor, keep: Tensor) -> Tensor:
    """A decode step: the queries are of one size, the keys of all."""
    return F.scaled_dot_product_attention(x[:, :, :1], x.sin(), x.cos())


def keys_of_no_padding(x: Tensor, keep: Tensor) -> Tensor:
    table = torch.linspace(-1, 1, H * 8 * D).reshape(1, H, 8, D).expand(B, H, 8, D)
    return F.scaled_dot_product_attention(x, table, table.sin())


def behind_merged_heads(x: Tensor, keep: Tensor) -> Tensor:
    merged = x.transpose(1, 2).flatten(2) @ torch.linspace(-1, 1, (H * D) ** 2).reshape(H * D, H * D)
    heads = merged.unflatten(2, (H, D)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, x, x).transpose(1, 2).flatten(2)


def with_sinks(x: Tensor, keep: Tensor) -> Tensor:
    """One more score for each head, and for each row one that padding makes NaN."""
    scores = (x @ x.sin().mT).masked_fill(~keep[:, None, None, :], -1e9)
    sinks = x.sum(-1, keepdim=True) + torch.linspace(-1, 1, H)[:, None, None]
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ x.cos()


CASES = (
    plain, causal, with_kept_keys, with_added_mask, rows_without_keys, by_hand, one_query, keys_of_no_padding,
    behind_merged_heads, with_sinks,
)  # fmt: skip


def inputs(length: int, *, trains: bool, batch: int = B) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(length)
    x = torch.randn(batch, H, length, D, generator=random).requires_grad_(trains)
    keep = torch.rand(batch, length, generator=random) < 0.6
    keep[:, 0], keep[:, 1] = True, False
    return mark_sequence(x, 2), mark_sequence(keep, 1)


def outcome(run, x: Tensor, keep: Tensor) -> Tensor:
    result = run(x, keep)
    if not x.requires_grad:
        return result.flatten()
    ramp = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
    return torch.cat([result.detach().flatten(), torch.autograd.grad((result * ramp).sum(), x)[0].flatten()])


# Training holds the forward of inference.
@pytest.mark.quick("causal", "one_query", "keys_of_no_padding")
@pytest.mark.parametrize("trains", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("case", CASES, ids=lambda fn: fn.__name__)
def test_right_and_rewritten(case, trains):
    run, before = compiled(case, buckets=BUCKETS), snapshot()
    with counted() as counts:
        for length in LENGTHS:
            expected = outcome(case, *inputs(length, trains=trains))
            found = outcome(run, *inputs(length, trains=trains))
            assert (found - expected).norm() <= 1e-5 * expected.norm(), length
    assert counts.programs == len(BUCKETS) * (2 if trains else 1)
    after = snapshot()
    assert after["bucket_refusals"] == before["bucket_refusals"]
    passes = after["passes"][len(before["passes"]) :]
    assert [p["rewritten"] for p in passes if p["name"] == "rewrite_attention"] == [1]


def test_batches_of_all_sizes():
    run = compiled(with_kept_keys, buckets=[4, 16])
    for batch, length in ((3, 9), (2, 12), (4, 16)):
        x, keep = (mark_sequence(t, 0) for t in inputs(length, trains=True, batch=batch))
        expected = outcome(with_kept_keys, x, keep)
        assert (outcome(run, x, keep) - expected).norm() <= 1e-5 * expected.norm()
