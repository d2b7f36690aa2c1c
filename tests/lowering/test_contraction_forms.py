"""`kp::contract` takes as many passes over the matrix unit as the matmul precision says."""

from __future__ import annotations

import pytest
import torch
import torch_xla

from kp_dynamo.lowering.contraction_forms import CONTRACTION_FORMS
from kp_dynamo.lowering.program import settings

FORM = CONTRACTION_FORMS[torch.ops.kp.contract.default]
SIZES = {"b": 2, "s": 5, "k": 6, "n": 4, "h": 3}
EQUATIONS = (
    "bsk,nk->bsn",
    "bsk,nk->bns",
    "nk,bsk->bns",
    "bshk,nhk->bsn",
    "bsn,bsk->nk",
    "bsk,nhk->bhsn",
    "bsk,bsn->bkn",
    "hbsk,bhns->bnkh",
)


def operands(equation: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    terms = equation.split("->")[0].split(",")
    return [torch.randn([SIZES[c] for c in term], generator=generator).to(dtype) for term in terms]


def dots(result: torch.Tensor) -> list[str]:
    return [line for line in torch_xla._XLAC._get_xla_tensors_hlo([result]).splitlines() if " dot(" in line]


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("precision", ["high", "highest"])
def test_float32_has_the_precision_that_is_asked_for(equation, precision):
    a, b = operands(equation, torch.float32)
    with settings(precision):
        found = FORM(a.to("xla"), b.to("xla"), None, equation)
        [dot] = dots(found)
    assert f"operand_precision={{{precision},{precision}}}" in dot
    torch.testing.assert_close(found.cpu(), torch.einsum(equation, a, b), rtol=1e-5, atol=1e-5)


def test_a_bias_and_a_dtype():
    a, b = operands("bsk,nk->bns", torch.float32)
    bias = torch.randn(1, 4, 1)
    with settings("highest"):
        found = FORM(a.to("xla"), b.to("xla"), bias.to("xla"), "bsk,nk->bns", out_dtype=torch.bfloat16)
    wanted = torch.ops.kp.contract(a, b, bias, "bsk,nk->bns", out_dtype=torch.bfloat16)
    torch.testing.assert_close(found.cpu(), wanted, rtol=2**-7, atol=1e-5)  # a last place of bfloat16


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "highest"), (torch.float32, "default")], ids=str)
def test_one_pass_is_a_contraction_of_any_dimensions(dtype, precision):
    a, b = operands("bsk,nk->bns", dtype)
    with settings(precision):
        [dot] = dots(FORM(a.to("xla"), b.to("xla"), None, "bsk,nk->bns"))
    assert "[2,5,4]" in dot.split(" dot(")[0]
