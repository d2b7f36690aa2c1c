"""Every dtype through the default lowering: values to the last digit, and the dtype that eager gives."""

import pytest
import torch

from tests.spine import DEVICES, check_gradients_like_eager, check_like_eager, compiled

RAMP = torch.arange(12.0).reshape(3, 4) - 5
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def integer_arithmetic(x):
    return x + 1, x * x, x // 3, x % 3, x.sum(), x.cumsum(0), x == 2, x.sort()[0], x.to(torch.float64) / 2, x.abs()


@pytest.mark.quick("torch.int8", "torch.uint8", "torch.int64")
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype):
    check_like_eager(integer_arithmetic, torch.tensor([7, 2, 100, 5], dtype=dtype))


WIDE = torch.tensor([2**53 + 1, -(2**53) - 1, 2**31 + 7, 2**25 + 3, -7])


def test_wide_integers_lose_no_digit():
    check_like_eager(lambda x: (x // 3, torch.div(x, 3, rounding_mode="trunc"), x % 7, x + 2**40, x * 5, x.max()), WIDE)
    check_like_eager(lambda x: torch.full_like(x, 2**62 + 1), WIDE)
    narrow = torch.tensor([2**25 + 3, -(2**30) - 1], dtype=torch.int32)
    check_like_eager(lambda x: (x // 3, x // x.new_tensor(3), x % 7), narrow)


@pytest.mark.parametrize("align_corners", [True, False])
@pytest.mark.parametrize("size", [(2, 1, 3, 4), (1, 2, 2, 3, 5)])
def test_affine_grids_of_float64(size, align_corners):
    theta = torch.randn(size[0], len(size) - 2, len(size) - 1, dtype=torch.float64, requires_grad=True)
    grids = [
        f(theta, size, align_corners=align_corners)
        for f in (
            compiled(lambda *args, **how: torch.nn.functional.affine_grid(*args, **how)),
            torch.nn.functional.affine_grid,
        )
    ]
    torch.testing.assert_close(*grids, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(*(torch.autograd.grad(g.sin().sum(), theta)[0] for g in grids), rtol=1e-13, atol=1e-13)


def test_booleans():
    check_like_eager(lambda x: (x & x.flip(0), ~x, x ^ True, x.sum(), x.any(0), x.float() * 2), RAMP > 0)


def test_float64_loses_no_digit():
    x = torch.tensor([1e300, 1 + 1e-15, -0.1], dtype=torch.float64)
    for device in DEVICES:
        results = compiled(lambda x: (x * 2, x - 1, x * 0.1, x + 1e-50))(x.to(device))
        for mine, eager in zip(results, (x * 2, x - 1, x * 0.1, x + 1e-50), strict=True):
            assert torch.equal(mine.cpu(), eager)


def test_dtypes_that_a_factory_is_asked_for():
    def factories(x):
        float64 = torch.float64
        return (
            torch.linspace(0, 1, 7, dtype=float64, device=x.device),
            torch.arange(3, dtype=float64, device=x.device),
            torch.full((2,), 0.1, dtype=float64, device=x.device),
            torch.ones(2, dtype=torch.int16, device=x.device),
        )

    check_like_eager(factories, RAMP)
    assert torch.equal(compiled(factories)(RAMP)[0], factories(RAMP)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves(dtype):
    x = RAMP.to(dtype)
    check_like_eager(lambda x: (x * 2, x + 0.5, x.amax(0), x.float()), x)


COMPLEX = torch.tensor([1 + 2j, -3j, 0j, -1.5 + 0.5j])


def complex_arithmetic(x):
    return x * (1 + 2j), x.conj() * 2, x.abs(), x.real, x.imag + 1, torch.view_as_real(x)


def test_complex_numbers():
    check_like_eager(complex_arithmetic, COMPLEX)


def test_complex128_on_the_cpu():
    # On XLA tensors torch_xla's own `.cpu()` drops the imaginary part of complex128, compiled or not.
    x = COMPLEX.to(torch.complex128)
    torch.testing.assert_close(compiled(complex_arithmetic)(x), complex_arithmetic(x))


@pytest.mark.parametrize("view", [torch.conj, torch.Tensor.imag.__get__, lambda x: torch._neg_view(x.real)])
def test_inputs_with_pending_conjugation_or_negation(view):
    run, x = compiled(lambda x: x * (1 + 2j)), view(COMPLEX)
    for _ in range(2):
        torch.testing.assert_close(run(x), x * (1 + 2j))


def test_gradients_through_complex_numbers():
    x = torch.tensor([[1.0, 2.0], [0.5, -3.0]], requires_grad=True)
    check_gradients_like_eager(lambda x: torch.view_as_complex(x).abs() * x.sum(), x)


@pytest.mark.parametrize("value", [1e-3, -0.5, 0.0, 2.7, float("nan")])
def test_a_bool_tensor_of_a_varying_size_is_filled_with_whether_the_number_is_not_0(value):
    """At a fixed size, a pass makes a constant of it."""
    check_like_eager(
        lambda x: (torch.full_like(x > 0, value), x.new_full((x.shape[0],), value, dtype=torch.bool)),
        torch.randn(4, 3),
        dynamic=True,
    )
