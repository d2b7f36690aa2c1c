"""Rules of padding compute in the dtype of their results."""

import pytest
import torch
import torch.nn.functional as F

from tests.spine import compiled

CASES = {
    "average without padding": lambda x: F.avg_pool1d(x, 7, 1, 3, count_include_pad=False),
    "fractional positions": lambda x: x * torch.arange(0.1, x.shape[2], 1.0, dtype=torch.float64),
}


@pytest.mark.parametrize("name", CASES)
def test_float64(name):
    run = compiled(CASES[name], buckets=[16, 32])
    for length in (11, 13, 19):
        x = torch.linspace(1, 2, 6 * length, dtype=torch.float64).reshape(2, 3, length).requires_grad_()
        found, wanted = run(x), CASES[name](x)
        torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
        mine, eager = (torch.autograd.grad(r.square().sum(), x)[0] for r in (found, wanted))
        torch.testing.assert_close(mine, eager, rtol=1e-13, atol=1e-13)
