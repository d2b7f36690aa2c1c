"""Attention on the whole way of a graph: rewritten, run by XLA, and compared with eager. B, H, S, D as usual."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kp_dynamo import explain
from tests.spine import compiled
from tests.transformer import TinyGpt

TOKENS = torch.arange(64).reshape(2, 32) % 32


def step(run: object, model: torch.nn.Module, tokens: Tensor) -> Tensor:
    model.zero_grad()
    run(tokens).backward()  # type: ignore[operator]
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return TinyGpt(length=32)


def test_gradients_err_no_more_than_those_of_autocast(model):
    exact = step(double := copy.deepcopy(model).double(), double, TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = step(model, model, TOKENS)
    ours = step(torch.compile(model, backend="kp_tpu"), model, TOKENS)
    assert (ours - exact).norm() <= (autocast - exact).norm()


def test_a_training_step_is_rewritten(model):
    [found] = [p for p in explain(model, TOKENS).passes if p.name == "rewrite_attention"]
    assert found.rewritten > 0
    assert found.refused == ()


def test_the_conservative_level_leaves_it():
    q = torch.randn(1, 2, 8, 4)
    found = explain(lambda q: F.scaled_dot_product_attention(q, q, q), q, options={"level": "conservative"})
    assert "rewrite_attention" not in {p.name for p in found.passes}


def test_sizes_stay_symbolic():
    run = compiled(F.scaled_dot_product_attention, dynamic=True)
    for length in (5, 7, 9):
        q, k, v = (torch.randn(2, 3, length, 4, requires_grad=True) for _ in range(3))
        mask = torch.arange(length) < torch.tensor([length, 3])[:, None, None, None]
        with torch._dynamo.config.patch(error_on_recompile=length > 5):
            mine = torch.autograd.grad(run(q, k, v, mask).square().sum(), (q, k, v))
        eager = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask).square().sum(), (q, k, v))
        torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-6)


def left_padded(q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
    """The masks of transformers' eager attention: the first queries of a sequence padded on the left keep no key."""
    least, length = torch.finfo(q.dtype).min, q.shape[2]
    causal = torch.full((length, length), least, dtype=q.dtype).triu(1)
    padding = torch.zeros(kept.shape, dtype=q.dtype).masked_fill(~kept, least)
    return (q @ k.mT * 0.5 + causal + padding).softmax(-1) @ v


@pytest.mark.quick("{'precision': 'float32'}", "{'level': 'aggressive'}")
@pytest.mark.parametrize("options", [{"precision": "float32"}, {"level": "balanced"}, {"level": "aggressive"}], ids=str)
def test_rows_that_keep_no_key_are_eager_s(options):
    generator = torch.Generator().manual_seed(0)
    operands = [torch.randn(2, 2, 6, 4, generator=generator).requires_grad_() for _ in range(3)]
    kept = torch.arange(6) >= torch.tensor([0, 3])[:, None, None, None]
    run = torch.compile(left_padded, backend="kp_tpu", options=options)
    mine, eager = ([y := f(*operands, kept), *torch.autograd.grad(y.sin().sum(), operands)] for f in (run, left_padded))
    # float32: sums of six products in another order; bfloat16: five roundings of 2**-9 on the longest way, twice.
    tolerance = 1e-5 if "precision" in options else 2e-2
    for got, wanted in zip(mine, eager, strict=True):
        assert (got - wanted).norm() <= tolerance * wanted.norm()
