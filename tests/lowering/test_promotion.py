"""Operators of two dtypes, and of integers with numbers that their dtype does not hold: as eager."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tests.spine import check_gradients_like_eager, check_like_eager, compiled

INF, NAN = math.inf, math.nan
INTEGERS = torch.tensor([-128, -8, -3, -1, 0, 1, 2, 3, 7, 100, 127, 5])
OF_TWO = {
    "+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y, "/": lambda x, y: x / y,
    "**": lambda x, y: x**y, "&": lambda x, y: x & y, "|": lambda x, y: x | y, "^": lambda x, y: x ^ y,
    "//": lambda x, y: x // (y.abs() + (y == 0)), "%": lambda x, y: x % (y.abs() + (y == 0)),
    "<<": lambda x, y: x << y, ">>": lambda x, y: x >> y, "<": torch.lt, "==": torch.eq, ">=": torch.ge,
    "maximum": torch.maximum, "where": lambda x, y: torch.where((x > 0).reshape(-1)[:1], x, y), "isin": torch.isin,
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]), "stack": lambda x, y: torch.stack([x, y]),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2), "addcmul": lambda x, y: torch.addcmul(x, y, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y * y + 1), "atan2": torch.atan2, "ldexp": torch.ldexp,
    "copysign": torch.copysign, "clamp": torch.clamp, "xlogy": torch.xlogy, "hypot": torch.hypot, "fmod": torch.fmod,
    "bucketize": lambda x, y: torch.bucketize(x, y.reshape(-1).sort()[0]),
    "masked_fill": lambda x, y: x.masked_fill(x > 1, y),
    "alpha": lambda x, y: torch.add(x, y, alpha=3), "float_power": torch.float_power, "logical_xor": torch.logical_xor,
    "add_": lambda x, y: x.clone().add_(y), "copy_": lambda x, y: x.clone().copy_(y), "gt": lambda x, y: (x > 0) * y,
}  # fmt: skip


def _of(dtype):
    return INTEGERS % 2 == 1 if dtype == torch.bool else INTEGERS.to(dtype) + (0.25 if dtype.is_floating_point else 0)


def _works(op, *args):
    """Whether eager takes it, and Dynamo, which runs it on fake tensors."""
    try:
        op(*args)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            op(*args)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def _check_table(ops, *args):
    """One graph of all of them."""
    names = [name for name, op in ops.items() if _works(op, *args)]
    found = compiled(lambda *args: [ops[name](*args) for name in names])(*args)
    for name, mine in zip(names, found, strict=True):
        torch.testing.assert_close(
            mine, ops[name](*args), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.quick(
    "torch.bool-torch.int64", "torch.uint8-torch.int8", "torch.int8-torch.bool", "torch.int64-torch.uint8",
)  # fmt: skip
@pytest.mark.parametrize(
    ("first", "second"), list(itertools.permutations((torch.bool, torch.uint8, torch.int8, torch.int64), 2)), ids=str
)
def test_two_dtypes(first, second):
    _check_table(OF_TWO, _of(first), _of(second).roll(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.uint8, torch.int32), (torch.int16, torch.int32), (torch.int32, torch.float64),
        (torch.bfloat16, torch.float32), (torch.bfloat16, torch.int8), (torch.float64, torch.float32),
    ],
)  # fmt: skip
def test_two_wider_dtypes(first, second):
    _check_table(OF_TWO, _of(first), _of(second).roll(5))
    _check_table(OF_TWO, _of(second), _of(first)[9])


OF_A_NUMBER = {
    "+": lambda x, n: x + n, "-": lambda x, n: n - x, "*": lambda x, n: x * n, "/": lambda x, n: x / n,
    "//": lambda x, n: x // n, "%": lambda x, n: x % n, "r%": lambda x, n: n % x.clamp(min=1), "r/": lambda x, n: n / x,
    "**": lambda x, n: x**n, "r**": lambda x, n: n**x.clamp(min=0), "fmod": lambda x, n: torch.fmod(x, n),
    "<<": lambda x, n: x << n, ">>": lambda x, n: x >> n, "<": lambda x, n: x < n, "<=": lambda x, n: x <= n,
    "==": lambda x, n: x == n, "!=": lambda x, n: x != n, ">": lambda x, n: x > n, ">=": lambda x, n: x >= n,
    "&": lambda x, n: x & n, "isin": lambda x, n: torch.isin(x, n), "rsub": lambda x, n: torch.rsub(x, n, alpha=2),
    "alpha": lambda x, n: torch.add(x, x, alpha=n), "clamp": lambda x, n: x.clamp(max=n),
    "powers": lambda x, n: x ** x.clamp(min=0),
}  # fmt: skip


@pytest.mark.quick("-1-torch.uint8", "300-torch.int8", "300-torch.uint8", "1.5-torch.int16", "1.5-torch.uint8")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int64], ids=str)
@pytest.mark.parametrize("number", [-1, 300, *(pytest.param(n, marks=pytest.mark.slow) for n in (-300, 70)), 1.5])
def test_numbers_that_a_dtype_does_not_hold(dtype, number):
    _check_table(OF_A_NUMBER, _of(dtype), number)


def test_large_exponents():
    x = torch.tensor([3, -3, 5, 2, 1, -1, 0])
    y = torch.tensor([64, 65, 2**40 + 7, 64, 2**62, 2**62 + 1, 99])
    check_like_eager(lambda x, y: (x**y, x**64, x**1001, 3 ** y.abs(), x ** -y.sign().abs().neg()), x, y)


def test_a_multiplication_with_a_boolean_keeps_infinities_and_nan():
    x, mask = torch.tensor([NAN, INF, 1.0]), torch.tensor([False, False, True])
    check_like_eager(lambda x, m: (x * m, m * x, x * m.float(), x * ~m, (x * m).sum(), x * m.double()), x, mask)


@pytest.mark.quick("<lambda>0", "<lambda>2", "<lambda>4")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.amin(0), lambda x: x.amax(1), lambda x: x.max(), lambda x: x.min(),
        lambda x: x.new_zeros(2).scatter_reduce(0, (x[0] == 1).long(), x[1], "amin"),
    ],
)  # fmt: skip
def test_gradients_of_extremes_that_are_nan(fn):
    x = torch.tensor([[1.0, NAN, 2.0], [0.0, 3.0, NAN]], requires_grad=True)
    check_gradients_like_eager(fn, x)


OUT_OF_RANGE = torch.tensor(
    [
        -1.2, -0.5, 255.9, 256, 300, -300, 128, -129, 32768, 40000, 70000.7, -1e5, 2.0**31 - 128, 2.0**31, -(2.0**31),
        3e9, -3e9, 2.0**32 + 512, 2.0**40 + 2.0**20, -(2.0**40) - 5, 2.0**63, -(2.0**63), 1e19, -1e19, 1e30, INF,
        -INF, NAN,
    ],
    dtype=torch.float64,
)  # fmt: skip


@pytest.mark.quick("torch.float32", "torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_floats_out_of_the_range_of_an_integer(dtype):
    """As on x86: through int32, uint8 and int64 through int64; what these do not hold becomes their least."""

    def casts(x):
        kinds = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool
        row = x[None]
        return (
            *(x.to(kind) for kind in kinds), x.byte(), x.int(), torch.zeros_like(x, dtype=torch.uint8).copy_(x),
            row.sum(0, dtype=torch.uint8), row.prod(0, dtype=torch.int16), row.cumsum(0, dtype=torch.int8),
            x.to(torch.uint8) + x,
        )  # fmt: skip

    check_like_eager(casts, OUT_OF_RANGE.to(dtype))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_integers_that_xla_lacks_run_on_the_cpu(dtype):
    x = torch.tensor([1.0, 40000.0, 3e9])
    assert torch.equal(compiled(lambda x: x.to(dtype))(x), x.to(dtype))


GELU_LINE = torch.tensor([-INF, -3e38, -1e30, -100.0, -7.0, -6.0, -5.0, -3.0, -1.0, 0.0, 2.0, 5.5, 9.0, 1e30, INF, NAN])


@pytest.mark.quick("torch.float32-none", "torch.float64-tanh", "torch.bfloat16-none")
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gelu_ends_at_zero(dtype, approximate):
    x = GELU_LINE.to(dtype)
    for run in (compiled(lambda x: F.gelu(x, approximate=approximate)), _behind_a_linear(approximate)):
        leaf, eager = x.clone().requires_grad_(), x.clone().requires_grad_()
        result, expected = run(leaf), F.gelu(eager, approximate=approximate)
        # Eager's gelu of an infinity is NaN in float32 on processors with AVX-512.
        expected = torch.where(x == INF, eager, expected)
        torch.testing.assert_close(
            result, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6, equal_nan=True
        )
        gradients = (torch.autograd.grad(r.sum(), t)[0] for r, t in ((result, leaf), (expected, eager)))
        torch.testing.assert_close(
            *gradients, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=4e-6, equal_nan=True
        )


def _behind_a_linear(approximate):
    """Fused into one operator; its matrix of 1 changes nothing."""
    return lambda x: compiled(lambda x, w: F.gelu(F.linear(x[:, None], w), approximate=approximate)[:, 0])(
        x, torch.ones(1, 1, dtype=x.dtype)
    )


def test_tanh_of_float64_reaches_its_ends():
    x = torch.tensor([-INF, -1e5, -20.0, 0.3, 19.2, 100.0, NAN], dtype=torch.float64)
    run = compiled(lambda x: (torch.tanh(x), torch.tanh(x) + 1))
    for mine, eager in zip(run(x), (torch.tanh(x), torch.tanh(x) + 1), strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-15, atol=2e-16, equal_nan=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda mask, x: mask - x, "subtraction"),
        (lambda mask, x: x - mask, "subtraction"),
        (lambda mask, x: 1.0 - mask, "subtraction|Subtraction"),
        (lambda mask, x: torch.rsub(mask, x), "subtraction|Subtraction"),
        (lambda mask, x: (x * x).sub_(mask), "subtraction"),
        (lambda mask, x: torch.complex(x, x) < 1, "order complex"),
        (lambda mask, x: x >= torch.complex(x, x), "order complex"),
        (lambda mask, x: torch.sign(torch.complex(x, x)), "the sign of complex"),
        (lambda mask, x: x.int() ** -1, "negative power"),
    ],
)
def test_operands_that_only_the_kernels_of_torch_refuse(function, message):
    mask, x = torch.tensor([True, False]), torch.tensor([0.5, 2.0])
    with pytest.raises((RuntimeError, NotImplementedError)):
        function(mask, x)
    with pytest.raises(Exception, match=message):
        compiled(function)(mask, x)
