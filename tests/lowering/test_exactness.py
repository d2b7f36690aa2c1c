"""Where eager's result is exact, so is ours: what rounds up to the last bit is floored, compared, or divided by itself.

XLA's algebra divides by a constant by multiplying with its reciprocal, and adds constants to each other first.
"""

import math

import pytest
import torch
import torch.nn.functional as F
import torch_xla

from kp_dynamo.lowering import hidden_constants
from tests.spine import DEVICES, compiled, on

WHOLE = torch.arange(1, 400).float()
TIMES_41 = WHOLE * 41
DIVISIONS = {
    "number": lambda x: x / 41,
    "whole tensor": lambda x: (x.long() / 41).floor().long(),
    "made tensor": lambda x: x / torch.full_like(x, 41),
    "made number": lambda x: x / torch.full((), 41.0, device=x.device),
    "truncated": lambda x: (torch.div(x + 3, 41, rounding_mode="trunc"), torch.div(x, 41, rounding_mode="floor")),
    "in place": lambda x: x.clone().div_(41),
    "counted": lambda x: torch.ones_like(x).cumsum(0) * 3 / torch.arange(1, len(x) + 1, device=x.device),
    "made dividend": lambda x: torch.arange(399, device=x.device) * 41 / 41 + 0 * x,
}
MEANS = {
    "mean": lambda x: x[:, None].expand(-1, 41).clone().mean(1),
    "of all": lambda x: (x[5] + torch.zeros(41, device=x.device)).mean(),
    "of booleans": lambda x: (x[:41] > 0).double().mean() == 1,
    "deviation": lambda x: x[:, None].expand(-1, 41).clone().std(1),
    "variance": lambda x: torch.var_mean(x[:, None].expand(-1, 41).clone(), 1, correction=0),
    "standardized": lambda x: (lambda y: (y - y.mean()) / (y.std() + 1e-8))(x[7].expand(41).clone()),
    "layer_norm": lambda x: F.layer_norm(x[:, None].expand(-1, 41).clone(), (41,)),
    "squared errors": lambda x: F.mse_loss(x[:41] * 0, x[:41] * 0 + 3),
    "cross entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x[:41] * 0 + 200, x[:41] * 0),
}
POOLS = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[5].expand(1, 1, 42).clone(), 7),
    "avg_pool2d": lambda x: F.avg_pool2d(x[5].expand(1, 1, 35, 35).clone(), (5, 7), stride=3),
    "padded": lambda x: F.avg_pool2d(x[5].expand(1, 1, 9, 9).clone(), 3, padding=1, count_include_pad=False),
    "hanging over": lambda x: F.avg_pool2d(x[5].expand(1, 1, 9, 9).clone(), 5, stride=3, ceil_mode=True),
    "avg_pool3d": lambda x: F.avg_pool3d(x[5].expand(1, 1, 6, 6, 6).clone(), 3),
}
SUMS = {
    "rounded by a large number": lambda x: (x * 0.25 + 2**23) - 2**23,
    "a difference": lambda x: (1e8 - x) + 1.0,
    "turned": lambda x: 3.0 - (x + 1e8),
    "a view between": lambda x: (x + 1e8).view(3, -1) - 1e8,
    "scaled": lambda x: torch.add(torch.rsub(x, 1e8), torch.ones((), device=x.device), alpha=-3),
}
POWERS = {
    "log2": lambda _: torch.log2(2.0 ** torch.arange(-120, 120).float()),
    "log10": lambda _: torch.log10(torch.tensor([10.0**k for k in range(11)])),
    "log2 of integers": lambda x: torch.log2(2 ** torch.arange(30, device=x.device)),
    "log2 of float64": lambda x: torch.log2(2.0 ** torch.arange(-300, 300, device=x.device).double()),
    "log10 of float64": lambda x: torch.log10(torch.tensor([10.0**k for k in range(19)]).double().to(x.device)).floor(),
}


def check_exact(fn, device, **options):
    expected, found = fn(WHOLE), compiled(fn, **options)(on(device, WHOLE))
    torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), found), expected, rtol=0, atol=0)


@pytest.mark.quick(
    "number-cpu", "whole tensor-xla", "made tensor-cpu", "made number-xla", "truncated-xla", "in place-cpu",
    "counted-xla", "made dividend-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", DIVISIONS)
def test_multiples_are_divided(name, device):
    check_exact(lambda x: DIVISIONS[name](x * 41), device)


@pytest.mark.parametrize("name", MEANS)
def test_equal_numbers_have_no_spread(name):
    check_exact(MEANS[name], "cpu")


@pytest.mark.parametrize("name", POOLS)
def test_equal_numbers_are_pooled(name):
    check_exact(POOLS[name], "cpu")


@pytest.mark.quick(
    "rounded by a large number-cpu", "a difference-xla", "turned-xla", "a view between-cpu", "scaled-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SUMS)
def test_two_constants_are_added_one_after_the_other(name, device):
    check_exact(SUMS[name], device)


@pytest.mark.parametrize("name", POWERS)
def test_logarithms_of_powers(name):
    check_exact(POWERS[name], "cpu")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * math.nan).exp(),
        lambda x: (math.nan - x).expm1() + x,
        lambda x: ((x / math.nan + x).view(3, 2) * 2).softmax(-1),
        lambda x: torch.sinh(x.bfloat16() * torch.full_like(x, math.nan)),
        lambda x: ((x > 0).float() + math.nan).exp(),
    ],
)
def test_exponentials_of_nan(function):
    """XLA:CPU leaves what was in memory, where LLVM knows that the operand is NaN."""
    x = torch.arange(-3.0, 3.0)
    assert torch.equal(compiled(function)(x).isnan(), function(x).isnan())


def test_the_error_function_ends_at_1():
    check_exact(lambda x: (torch.erf(x + 3), torch.erf(-x - 3), torch.special.ndtr(x + 6)), "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype):
    def fn(x):
        # XLA rounds a chain of sums in bfloat16 once, at its end.
        chain = (x + 300) - 300 if dtype != torch.bfloat16 else x
        return x / 41, x / 0.1, (x[:41] * 0 + 3).mean(), chain, torch.div(x, 0.1, rounding_mode="trunc")

    x = (torch.arange(1, 40) * 41).to(dtype)
    torch.testing.assert_close(compiled(fn)(x), fn(x), rtol=0, atol=0)


@pytest.mark.parametrize(("count", "hides"), [(41, True), (64, False), (96, True)])
def test_a_count_whose_reciprocal_is_exact_is_not_hidden(count, hides):
    # Each hidden count is six operations of a program.
    x = torch.full((3, count), 7.1, device="xla")
    average = hidden_constants.mean(x, [1])
    assert ("select" in torch_xla._XLAC._get_xla_tensors_hlo([average])) == hides
    torch.testing.assert_close(average.cpu(), torch.full((3,), 7.1), rtol=0 if count == 64 else 1e-6, atol=0)


SMALL = torch.tensor([1e-8, 1e-7, 1e-6, 1e-5, 1e-4])
CANCELLING = {
    "celu": lambda x: F.celu(-x),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, torch.zeros_like(x), reduction="none"),
    "acosh": torch.acosh,
    "arange": lambda x: torch.arange(0, 99999.95, 0.1, dtype=torch.float64, device=x.device)[-5:] + 0 * x,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CANCELLING)
def test_small_differences_keep_their_digits(name, device):
    x = 1 + SMALL * 30 if name == "acosh" else SMALL
    found, wanted = compiled(CANCELLING[name])(*on(device, (x,))).cpu(), CANCELLING[name](x)
    torch.testing.assert_close(found, wanted, rtol=1e-6 if name != "arange" else 1e-15, atol=0)
