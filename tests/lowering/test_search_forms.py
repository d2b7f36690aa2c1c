"""`searchsorted` and `bucketize` on the device, element for element as eager's search."""

import math

import pytest
import torch

from tests.spine import check_like_eager, compiled

NUMBERS = torch.tensor([[-1.0, 0.0, 0.0, 2.0, 7.5], [-math.inf, -3.0, 1.0, 1.0, math.inf]])
VALUES = torch.tensor([[0.0, -0.0, 2.5, -9.0, math.inf, math.nan], [1.0, 0.5, -math.inf, 8.0, math.nan, -3.0]])


@pytest.mark.quick("how1", "how3")
@pytest.mark.parametrize("how", [{}, {"right": True}, {"side": "right"}, {"out_int32": True, "side": "left"}])
def test_of_rows_and_of_one_row(how):
    def fn(numbers, values):
        of_all = torch.searchsorted(numbers[0], values, **how), torch.searchsorted(numbers[1], values[0, 1], **how)
        return torch.searchsorted(numbers, values, **how), *of_all, torch.searchsorted(numbers[0], 0.3, **how)

    check_like_eager(fn, NUMBERS, VALUES, strict=True)


def test_numbers_that_are_not_sorted_and_nan_give_what_eager_finds():
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 4, 7, 8, 33):
        numbers = torch.randn(4, length, generator=generator)
        numbers[0, length // 2] = math.nan
        values = torch.randn(4, 20, generator=generator)
        check_like_eager(lambda n, v: (torch.searchsorted(n, v), torch.searchsorted(n, v, right=True)), numbers, values)


def test_a_sorter():
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    check_like_eager(
        lambda x, v: [torch.searchsorted(y, v, sorter=y.argsort(-1)) for y in (x, x[0])], x, x * 2, strict=True
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    numbers = torch.tensor([0, 3, 3, 5, 100]).to(dtype)
    check_like_eager(
        lambda n, v: (torch.searchsorted(n, v), torch.bucketize(v, n, right=True)), numbers, numbers.flip(0)
    )


def test_large_integers_are_compared_exactly():
    numbers = torch.tensor([2**53, 2**53 + 1, 2**62, 2**62 + 3])
    check_like_eager(lambda n, v: torch.searchsorted(n, v, right=True), numbers, numbers + 1, strict=True)


def test_numbers_of_another_dtype_than_the_values():
    check_like_eager(
        lambda n, v: (torch.searchsorted(n, 2.5), torch.bucketize(v, n), torch.searchsorted(v, n)),
        torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.0, 2.5]), strict=True,
    )  # fmt: skip


def test_buckets_of_a_tensor_and_of_nothing():
    def fn(x, edges):
        return torch.bucketize(x, edges), torch.bucketize(x[:0], edges), torch.bucketize(x, edges[:0], out_int32=True)

    check_like_eager(fn, VALUES, NUMBERS[0], strict=True)


def test_other_sizes_at_later_calls():
    run = compiled(torch.searchsorted, dynamic=True, strict=True)
    for length, count in ((5, 3), (9, 4), (1, 2)):
        numbers, values = torch.randn(length).sort().values, torch.randn(count)
        assert torch.equal(run(numbers, values), torch.searchsorted(numbers, values))


def test_what_eager_refuses_is_refused():
    with pytest.raises(RuntimeError):
        compiled(lambda n, v: torch.searchsorted(n, v, side="left", right=True))(NUMBERS[0], VALUES)
