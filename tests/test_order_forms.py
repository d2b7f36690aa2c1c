"""Sorts: each NaN is the largest, whatever its sign, and zeros are equal, so that a stable sort keeps their order."""

import pytest
import torch

from tests.spine import assert_same, compiled

NEGATIVE_NAN = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
X = torch.cat(
    [torch.tensor([1.0, 0.0, -0.0, 0.0, -0.0, 2.0, torch.nan]), NEGATIVE_NAN, torch.tensor([-1.0, torch.inf])]
)

ORDERS = {
    "sort": lambda x: x.sort(stable=True).indices,
    "descending": lambda x: x.sort(stable=True, descending=True).indices,
    "argsort": lambda x: x.argsort(stable=True),
    "values": lambda x: x.sort().values,
    "largest": lambda x: x.topk(3).values,
    "smallest": lambda x: x.topk(8, largest=False).values,
    "k-th": lambda x: x.kthvalue(9).values,
    "rounded": lambda x: (x.nan_to_num(0.3) * 0.4).round().sort(stable=True).indices,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ORDERS)
def test_zeros_and_nans_are_ordered_as_in_eager(name, dtype):
    x = X.to(dtype)
    assert_same(compiled(ORDERS[name])(x), ORDERS[name](x))


def test_a_nan_that_the_program_makes_is_the_largest():
    def fn(x):
        return (x - x.clamp(min=0)).sort().values

    x = torch.tensor([3.0, torch.inf, -2.0, -torch.inf])
    assert_same(compiled(fn)(x), fn(x))
