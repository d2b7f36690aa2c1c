"""Scores that are moved, regrouped, repeated or rounded between their products are no attention, and are left alone."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kp_dynamo.autograd.decompositions.table import decompositions
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from tests.graphs import trace_joint
from tests.spine import compiled

S = 8


def slots(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).mT @ v


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT).mT.softmax(-1) @ v


def over_groups_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).view(2, 2, S, 2, 4).softmax(-1).view(2, 2, S, S) @ v


def heads_as_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).transpose(0, 1).softmax(-1) @ v


def one_query_without_its_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kept = torch.arange(S) < torch.tensor([[8], [3]])
    scores = (q[:, 0, :1] @ k[:, 0].mT).squeeze(1).masked_fill(~kept, -1e9)
    return scores.softmax(-1).unsqueeze(1) @ v[:, 0]


def groups_in_the_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.reshape(2, 2 * S, 16) @ k[:, 0].mT).view(2, 2, S, S)
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1).view(2, 2 * S, S) @ v[:, 0]


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q[:1] @ k[:1].mT).expand(2, 2, S, S).softmax(-1) @ v


def repeated_by_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q[:1] @ k[:1].mT) + torch.arange(2.0 * S).view(2, 1, 1, S)).softmax(-1) @ v


def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).to(torch.int32).to(q.dtype).softmax(-1) @ v


def scores_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    least = torch.zeros(S, S, dtype=torch.half)
    least[3] = torch.finfo(torch.half).min
    return ((q @ k.mT).half() + least).float().softmax(-1) @ v


def probabilities_in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).bfloat16().float() @ v


def softmax_in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1, dtype=torch.bfloat16).float() @ v


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, S, 16, generator=generator).requires_grad_() for _ in range(3)]


def rewritten(fn, *args: Tensor) -> PassReport:
    with sdpa_kernel(SDPBackend.MATH):
        gm = trace_joint(fn, *args, decompositions=decompositions())
    FoldConstants()(gm)
    return RewriteAttention()(gm)


@pytest.mark.quick("slots", "transposed", "repeated_by_a_mask", "rounded")
@pytest.mark.parametrize(
    "fn",
    [
        slots, transposed, over_groups_of_keys, heads_as_batch, one_query_without_its_dimension, groups_in_the_rows,
        repeated, repeated_by_a_mask, rounded, scores_in_half, probabilities_in_bfloat16, softmax_in_bfloat16,
    ],
)  # fmt: skip
def test_another_computation_is_left_alone_and_right(fn):
    args = operands()
    report = rewritten(fn, *args)
    assert report.rewritten == 0
    assert re.search("splits queries or keys|permutes its|repeats its|rounds its", report.refused[0][1])
    expected, found = fn(*args), compiled(fn, precision="float32")(*args)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.sum(), args, allow_unused=True) for out in (expected, found)]
    for mine, theirs in zip(*grads, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs)


LATER = torch.ones(S, S, dtype=torch.bool).triu(1)


@pytest.mark.quick("mask1", "mask3")
@pytest.mark.parametrize("mask", [torch.arange(S) > 5, torch.tensor(False), LATER, LATER[:, :1]])
def test_masks_of_few_dimensions_have_gradients(mask):
    check(lambda q, k, v, m: (q @ k.mT).masked_fill(m, -1e9).softmax(-1) @ v, mask)


def check(fn, mask: Tensor) -> None:
    """Values and gradients of a function that is rewritten are eager's, NaN among them."""
    args = operands()
    expected, found = fn(*args, mask), compiled(fn, precision="float32")(*args, mask)
    torch.testing.assert_close(found, expected, equal_nan=True)
    grads = [torch.autograd.grad(out[:, :, 1:].sum(), args) for out in (expected, found)]
    torch.testing.assert_close(grads[1], grads[0], equal_nan=True)
    assert rewritten(fn, *args, mask).rewritten == 1


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -1e31, -1e9])
def test_rows_of_very_low_scores_are_no_rows_without_scores(least):
    mask = torch.zeros(1, 1, S, S)
    mask[..., 0, :] = least
    check(lambda q, k, v, m: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m), mask)


def test_a_row_without_keys_gives_no_gradient_where_nobody_asks_for_it():
    check(
        lambda q, k, v, m: (q @ k.mT).masked_fill(m, -math.inf).softmax(-1) @ v,
        torch.ones(S, S, dtype=torch.bool).triu(),
    )


@pytest.mark.quick("300000000000.0")
@pytest.mark.parametrize("scale", [1e9 / 3, 3e11])
def test_a_huge_scale_gives_no_nan(scale):
    q, k, v = operands()
    attend = torch.nn.functional.scaled_dot_product_attention
    found = compiled(lambda q, k, v: attend(q, k, v, scale=scale), precision="float32")(q, k, v)
    torch.testing.assert_close(found, attend(q, k, v, scale=scale))
