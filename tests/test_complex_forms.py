"""Complex numbers: gradients with a conjugate, branches as ATen's, NaN in either part."""

import pytest
import torch

from tests.spine import assert_same, check_gradients_like_eager, check_like_eager, compiled

Z = torch.tensor([0.5 + 1j, -1 + 1j, -1 - 1j, -2 + 0j, 0.3 - 0.2j, 2 - 3j, 300 - 900j, 1.001 + 1e-3j])
FUNCTIONS = [torch.tanh, torch.sigmoid, torch.acos, torch.acosh]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_values_and_gradients(fn):
    check_like_eager(lambda z: fn(z), Z)
    check_gradients_like_eager(lambda z: torch.view_as_real(fn(z)), Z.clone().requires_grad_())


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_in_complex128(fn):
    z, other = (Z.to(torch.complex128).requires_grad_() for _ in range(2))
    mine, eager = compiled(lambda z: fn(z))(z), fn(other)
    assert_same(mine.detach(), eager.detach())
    assert_same(*(torch.autograd.grad(y.abs().sum(), x)[0] for y, x in ((mine, z), (eager, other))))


def test_a_nan_in_either_part():
    z = torch.tensor([complex(1, float("nan")), complex(float("nan"), 1), 1 + 1j])
    check_like_eager(torch.Tensor.isnan, z, strict=True)
