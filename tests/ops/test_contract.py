"""kp::contract: its values, how often they are rounded, what it refuses, what it is counted as."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kp_dynamo.backend import kp_tpu
from kp_dynamo.ops import ACTIVATIONS  # noqa: F401  # registers the operators

contract = torch.ops.kp.contract


def operands(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 5, 6), (4, 6), (1, 4, 1)
    x, weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_rounds_once_on_either_device(dtype):
    x, weight, bias = operands(dtype)
    exact = torch.einsum("bsk,nk->bns", x.double(), weight.double()) + bias.double()
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8  # sums of 6; half of a bfloat16's last place
    run = torch.compile(lambda *args: contract(*args, "bsk,nk->bns"), backend=kp_tpu, options={"precision": "float32"})
    for result in (contract(x, weight, bias, "bsk,nk->bns"), run(x, weight, bias)):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=1e-6)


def test_a_wide_result_is_not_rounded():
    x, weight, _ = operands(torch.bfloat16)
    exact = torch.einsum("bsk,nk->bns", x.double(), weight.double())
    result = contract(x, weight, None, "bsk,nk->bns", out_dtype=torch.float32)
    torch.testing.assert_close(result.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "equation", "error", "text"),
    [
        (lambda x, w: (x, w.double()), "bsk,nk->bns", TypeError, "must have the same floating-point dtype"),
        (lambda x, w: (x.long(), w.long()), "bsk,nk->bns", TypeError, "must have the same floating-point dtype"),
        (lambda x, w: (x, w), "bs,nk->bns", ValueError, "does not name the dimensions of"),
    ],
)
def test_what_it_refuses(change, equation, error, text):
    x, weight, _ = operands()
    meta = [t.to("meta") for t in change(x, weight)]
    with pytest.raises(error, match=text):
        contract(*meta, None, equation)


def test_flops_are_those_of_its_matmul():
    x, weight, bias = operands()
    with FlopCounterMode(display=False) as counter:
        contract(x, weight, bias, "bsk,nk->bns")
    assert counter.get_total_flops() == 2 * 2 * 5 * 6 * 4
