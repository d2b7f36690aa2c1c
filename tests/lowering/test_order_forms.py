"""Sorts: each NaN is the largest, whatever its sign, and zeros are equal, so that a stable sort keeps their order."""

import pytest
import torch

from tests.spine import assert_same, check_like_eager, compiled

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


@pytest.mark.quick(
    "sort-torch.bfloat16", "descending-torch.float32", "argsort-torch.float32", "values-torch.bfloat16",
    "largest-torch.float32", "smallest-torch.bfloat16", "k-th-torch.bfloat16", "rounded-torch.bfloat16",
)  # fmt: skip
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


INDEX_USES = {
    "index_select": lambda x, i: x.index_select(0, i),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "index_add": lambda x, i: x.index_add(0, i, x[: len(i)]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[: len(i)]),
}


@pytest.mark.quick("index_select-1", "embedding-3", "index_add-1", "index_copy-3")
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", INDEX_USES)
def test_an_order_is_an_index(name, size):
    """torch_xla ends the process where an operator with two results makes one."""
    check_like_eager(lambda x, s: INDEX_USES[name](x, s.argsort()), torch.randn(3, 2), torch.randn(size))
