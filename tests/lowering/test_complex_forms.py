"""Complex numbers: gradients with a conjugate, branches as ATen's, NaN in either part."""

import math

import pytest
import torch

from tests.spine import assert_same, check_gradients_like_eager, check_like_eager, compiled

Z = torch.tensor([0.5 + 1j, -1 + 1j, -1 - 1j, -2 + 0j, 0.3 - 0.2j, 2 - 3j, 300 - 900j, 1.001 + 1e-3j])
FUNCTIONS = [torch.tanh, torch.sigmoid, torch.acos, torch.acosh]


@pytest.mark.quick("sigmoid", "acosh")
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


OF_PARTS = [
    torch.sin, torch.cos, torch.tan, torch.sinh, torch.cosh, torch.tanh, torch.asin, torch.acos, torch.atan,
    torch.asinh, torch.acosh, torch.atanh, torch.sqrt, torch.rsqrt, torch.log, torch.log2, torch.log10, torch.expm1,
]  # fmt: skip


LINE = [-math.inf, -1e30, -100.0, -1.0, -0.0, 0.0, 1e-30, 1.0, 3.0, 88.9, math.inf, math.nan]


def grid(dtype):
    line = torch.tensor(LINE, dtype=torch.float64)
    return torch.complex(line.repeat_interleave(len(LINE)), line.repeat(len(LINE))).to(dtype)


def without_huge(z):
    """Without finite numbers whose powers overflow: the last digits of the angle choose the signs of the infinities."""
    return z[(z.abs() < 1e20) | ~z.isfinite()]


def assert_equal_where_eager_is_a_number(mine, eager):
    """Parts relative to the number: XLA rounds a * b + c once. A larger intermediate may be NaN in eager, not here."""
    mine, eager = torch.view_as_real(mine).double(), torch.view_as_real(eager).double()
    size = eager.where(eager.isfinite(), 0).abs().amax(-1, keepdim=True)
    is_near = (mine == eager) | ((mine - eager).abs() <= 2e-5 * size + 1e-37)
    assert (is_near | eager.isnan()).all()


@pytest.mark.quick(
    "tan-torch.complex64", "sinh-torch.complex64", "tanh-torch.complex64", "acos-torch.complex64",
    "atanh-torch.complex64", "sqrt-torch.complex64", "rsqrt-torch.complex64", "log2-torch.complex64",
    "expm1-torch.complex64", "sgn-torch.complex64", "sigmoid-torch.complex64",
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "fn", [*OF_PARTS, torch.exp, torch.sgn, torch.sigmoid, torch.square], ids=lambda fn: fn.__name__
)
def test_at_extremes(fn, dtype):
    """XLA multiplies by an infinity or divides by its size where C99 has a limit: exp(-inf + inf j) is 0."""
    # On the CPU: `.cpu()` of an XLA tensor of complex128 loses its imaginary part.
    z = grid(dtype)
    z = z[z != complex(1, 1e-30)] if fn is torch.acos else z  # eager's complex128 has one digit there
    assert_equal_where_eager_is_a_number(compiled(lambda z: fn(z))(z), fn(z))


@pytest.mark.quick("0", "3", "1.5", "2j", "(1+1j)")
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, -2, 0.5, -0.5, 1.5, 2j, 1 + 1j, -1 + 0.5j])
def test_powers_at_extremes(exponent):
    z = without_huge(grid(torch.complex64))
    assert_equal_where_eager_is_a_number(compiled(lambda z: z**exponent)(z), z**exponent)
    assert_equal_where_eager_is_a_number(compiled(lambda z: exponent**z)(z), exponent**z)


def test_powers_of_tensors_at_extremes():
    z = without_huge(grid(torch.complex64))
    z, w = z.repeat_interleave(len(z)), z.repeat(len(z))
    is_moderate = (w.abs() < 10) | ~w.isfinite()  # of larger exponents, eager's last digits are rounding too
    z, w = z[is_moderate], w[is_moderate]
    assert_equal_where_eager_is_a_number(compiled(lambda z, w: z**w)(z, w), z**w)
    assert_equal_where_eager_is_a_number(compiled(lambda z, w: z.real**w)(z, w), z.real**w)
    assert_equal_where_eager_is_a_number(compiled(lambda z, w: z**w.real)(z, w), z**w.real)


def test_addcmul_at_extremes():
    z = grid(torch.complex64)
    for fn in (lambda z: torch.addcmul(z, z, z.flip(0), value=2), lambda z: torch.addcmul(z, z, z)):
        assert_equal_where_eager_is_a_number(compiled(fn)(z), fn(z))


def test_a_number_is_subtracted_as_its_negative_is_added():
    """The gradient of acosh at -100 - 0j had the other sign: -0 - 0 is -0, and on the other side of a branch cut."""
    z = torch.tensor([complex(-100, -0.0), complex(-100, 0.0)])
    check_gradients_like_eager(lambda z: torch.view_as_real(z.acosh()), z.requires_grad_())


@pytest.mark.quick("sin", "cosh", "tanh", "asin", "atan", "acosh", "sqrt", "log", "log10", "expm1")
@pytest.mark.parametrize("fn", OF_PARTS, ids=lambda fn: fn.__name__)
def test_either_part_is_right_beside_a_larger_one(fn):
    """Against complex128: XLA's own lose the smaller part, and all of it near 0 and 1."""
    run = compiled(lambda z: fn(z))
    for scale in (1e-6, 1e-3, 0.1, 1.0, 5.0, 70.0):
        real, imaginary = torch.randn(2, 200) * scale
        shares = ((1, 1), (1, 1e-4), (1e-4, 1), (1, 0), (0, 1))
        z = torch.cat([torch.complex(real * a, imaginary * b) for a, b in shares])
        expected = fn(z.to(torch.complex128))
        parts = [(run(z).real, expected.real), (run(z).imag, expected.imag)]
        # Near |z| = 1 the logarithm's real part is what is left of 1 - 1.
        away = (z.abs().log().abs() > 0.05) | (z.imag.abs() < 1e-3) | (fn not in (torch.log, torch.log2, torch.log10))
        for mine, right in parts if fn is not torch.expm1 else parts[1:]:
            is_known = away & right.isfinite() & (right.abs() < 1e37) & (right.abs() > 1e-36)
            assert ((mine - right).abs() <= 3e-6 * right.abs())[is_known].all()


@pytest.mark.parametrize(
    "fn", [torch.sqrt, torch.log, torch.sin, torch.cosh, torch.atanh, torch.tanh], ids=lambda fn: fn.__name__
)
def test_at_the_ends(fn):
    inf = complex(float("inf"), 1)
    z = torch.tensor([0j, 1e30 + 1e30j, 1e-30 + 1e-30j, 0.5 + 89j, 0j + 1e4j, 1e4 + 0j, inf, complex(1, inf.real)])
    mine, eager = compiled(lambda z: fn(z))(z), fn(z)
    known = torch.view_as_real(eager).isfinite().all(-1)
    assert_same(mine[known], eager[known])


def test_singular_points():
    z = torch.tensor([-1 + 0j, complex(-1, -0.0)])
    check_like_eager(lambda z: torch.view_as_real(z.log1p()), z)
    assert compiled(lambda z: z.rsqrt())(torch.tensor([0j])).real.item() == float("inf")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_both_parts_decide_whether_a_number_is_true(dtype):
    def truths(a, b, into):
        pairs = [op(a, b) for op in (torch.logical_and, torch.logical_or, torch.logical_xor)]
        into.copy_(a)
        return a.bool(), a.logical_not(), torch.where(a.bool(), 1, 2), *pairs, into + 0

    z = torch.tensor([0j, 1j, 1 + 0j, 1 + 1j, complex(0, float("nan"))], dtype=dtype)
    into = torch.zeros(5, dtype=torch.bool)
    assert_same(compiled(truths)(z, z.flip(0), into.clone()), truths(z, z.flip(0), into))


def test_a_nan_in_either_part():
    z = torch.tensor([complex(1, float("nan")), complex(float("nan"), 1), 1 + 1j])
    check_like_eager(torch.Tensor.isnan, z, strict=True)


def test_parts_are_multiplied_and_concatenated():
    """torch_xla's `view_as_real` ended the process there."""
    z = torch.randn(4, 8, dtype=torch.complex64)
    check_like_eager(lambda z: torch.view_as_real(z).mT @ torch.view_as_real(z), z)

    def turned(z):
        h = torch.view_as_real(z)
        return torch.cat([-h[..., 1:], h[..., :1]], -1) * h

    check_like_eager(turned, z)


def test_views_of_parts_are_returned_from_the_device():
    """torch_xla ends the process where it takes one of them itself, in eager code too."""

    def fn(x, y):
        parts = torch.view_as_real(-torch.complex(x, y))
        return parts, parts.permute(2, 0, 1), parts.transpose(0, 1)[1:]

    x, y = torch.randn(9, 8), torch.randn(9, 8)
    for mine, eager in zip(compiled(fn)(x.to("xla"), y.to("xla")), fn(x, y), strict=True):
        assert torch.equal(mine.cpu(), eager)


def test_a_write_to_a_view_of_parts_reaches_the_number():
    def fn(x, y):
        z = torch.complex(x, y)
        parts = torch.view_as_real(z).transpose(0, -1)
        parts.mul_(2)
        return z * 1, parts

    x, y = torch.randn(9, 8), torch.randn(9, 8)
    for mine, eager in zip(compiled(fn)(x.to("xla"), y.to("xla")), fn(x, y), strict=True):
        assert torch.equal(mine.cpu(), eager)
