"""Layer, group, instance and batch normalization where the mean is many deviations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.spine import check_gradients_like_eager, compiled

NORMS: dict[str, Callable] = {
    "layer": lambda x, w, b: F.layer_norm(x, (32,), w, b),
    "layer over two dimensions": lambda x, w, b: F.layer_norm(x, (8, 32), w.expand(8, 32), b.expand(8, 32)),
    "group": lambda x, w, b: F.group_norm(x, 4, w[:8], b[:8]),
    "instance": lambda x, w, b: F.instance_norm(x, weight=w[:8], bias=b[:8]),
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w[:8], b[:8], training=True),
}
# Of 2^-24 of the mean each, in sums of up to 128 numbers: eager is off by up to 20 of them.
ROUNDINGS = 64


def _results(norm: Callable, inputs: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    result = norm(*leaves)
    ramp = torch.arange(result.numel(), dtype=torch.float64).sin().to(dtype).reshape(result.shape)
    return [result.detach(), *torch.autograd.grad((result * ramp).sum(), leaves)]


@pytest.mark.quick("30000.0", "100.0-group", "1000.0-batch", "3000.0-layer")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("mean", [0.0, 100.0, 1000.0, 3000.0, 30000.0])
def test_a_norm_is_as_near_as_eager_at_any_mean(name, mean):
    inputs = [torch.randn(4, 8, 32) + mean, torch.rand(32) + 0.5, torch.randn(32)]
    exact = _results(NORMS[name], inputs, torch.float64)
    mine = _results(compiled(NORMS[name]), inputs, torch.float32)
    for got, true in zip(mine, exact, strict=True):
        assert (got - true).abs().max() <= ROUNDINGS * 2**-24 * max(mean, 8) * true.abs().max()


@pytest.mark.quick("torch.bfloat16-layer", "torch.float16-group", "torch.float64-layer")
@pytest.mark.parametrize("name", ["layer", "group"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_norm_of_every_dtype_keeps_it(name, dtype):
    inputs = [torch.randn(4, 8, 32) + 5, torch.rand(32) + 0.5, torch.randn(32)]
    for got, wanted in zip(
        _results(compiled(NORMS[name]), inputs, dtype), _results(NORMS[name], inputs, dtype), strict=True
    ):
        assert got.dtype == wanted.dtype
        # Sums of up to 128 numbers, and a mean of 5 deviations.
        bound = 128 * torch.finfo(dtype).eps * wanted.abs().max()
        assert (got.double() - wanted.double()).abs().max() <= bound


def test_norms_without_weights_and_with_some_gradients():
    x = torch.randn(2, 8, 16).requires_grad_()
    check_gradients_like_eager(lambda x: F.layer_norm(x, (16,)), x)
    weight = torch.ones(8, requires_grad=True)
    check_gradients_like_eager(lambda w, x: F.group_norm(x, 2, w), weight, x.detach())


def test_norms_of_nothing():
    for shape in ((0, 8, 16), (2, 8, 0)):
        x = torch.ones(shape)
        assert compiled(lambda x: F.layer_norm(x, x.shape[-1:]))(x).shape == shape


def test_a_group_of_one_element_gives_no_gradient_to_its_weight():
    """Normalized, it is 0; torch's decomposition multiplies what rounding leaves of 0 by the gradient."""
    x = torch.randint(-16, 17, (5, 8)) / 4
    weight = torch.ones(8, requires_grad=True)
    (compiled(lambda w: F.group_norm(x, 8, w))(weight) * torch.randn(5, 8) * 1e12).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))


@pytest.mark.parametrize("name", ["layer", "group"])
def test_gradients_have_the_dtypes_of_the_parameters(name):
    """Of float32 parameters with bfloat16 inputs, which are not rounded to eight bits on their way."""
    x, found = torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(0)).bfloat16(), []
    mine = compiled(NORMS[name], strict=True)
    for run, dtype, x_dtype in (
        (mine, torch.float32, torch.bfloat16),
        (NORMS[name], torch.float32, torch.bfloat16),
        (NORMS[name], torch.float64, torch.float64),
    ):
        leaves = [torch.ones(32, dtype=dtype, requires_grad=True), torch.zeros(32, dtype=dtype, requires_grad=True)]
        run(x.to(x_dtype), *leaves).backward((x * 2).to(x_dtype))
        found.append([leaf.grad for leaf in leaves])
    for got, eager, exact in zip(*found, strict=True):
        assert not torch.equal(got, got.bfloat16().float())
        # torch's fake tensors have the mean and the deviation of a group in bfloat16, which are saved.
        assert (got - exact).abs().max() <= max((eager - exact).abs().max(), 2**-8 * exact.abs().max())
