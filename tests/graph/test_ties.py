"""Gradients that go to the extreme of a row: of a product in bfloat16, the backward finds it."""

import pytest
import torch

from tests.spine import compiled

EXTREMES = {
    "largest": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1),
    "smallest": lambda x: torch.linalg.vector_norm(x, float("-inf"), dim=-1),
    "amax": lambda x: x.abs().amax(-1) * x.sgn().mean(-1),
    "max": lambda x: x.max() * x.sin().sum(),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_extreme_of_a_product(name):
    """No element equalled the norm: the gradient was 0 times 1 / 0."""
    weight = torch.randn(6, 2)
    run = compiled(lambda x: EXTREMES[name](x @ weight.t()), precision="bfloat16", level="balanced", dynamic=True)
    for _ in range(4):
        x = torch.rand(8, 8, 2, requires_grad=True)
        run(x).sum().backward()
        assert x.grad.isfinite().all()
        assert x.grad.abs().sum() > 0
