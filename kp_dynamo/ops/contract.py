"""`kp::contract`: a product over dimensions of any number, as an einsum names them, rounded once at its end.

    contract(a, b, bias, equation, *, out_dtype) -> result, of the dtype of a and b or of `out_dtype`

"bsk,nk->bns" is x [B, S, K] times a weight [N, K], its features before its positions. A letter is in two of the three
terms, and in a term once. `bias` broadcasts to the result. Sums, that with the bias as well, are float32 (float64 of
float64 operands) before they are rounded.

ATen's own products are of matrices and of batches of them, and whoever writes [B, S, K] as [B * S, K] for one fixes how
the TPU's compiler lays out what comes of it: see `passes/fold_views.py`, which puts these into graphs that are
differentiated already. The operator has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops.attention_forms import compute_dtype

_library = torch.library.Library("kp", "FRAGMENT")
_library.define(
    "contract(Tensor a, Tensor b, Tensor? bias, str equation, *, ScalarType? out_dtype=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)

# torch_xla 2.9 has an einsum of its own, one product of XLA's, and keeps it where XLA tensors are differentiated; below
# that ATen takes an einsum apart, into the flattened product that this operator is there to avoid.
_OF_XLA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradXLA)


def _contract(
    a: Tensor, b: Tensor, bias: Tensor | None, equation: str, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    return _computed(torch.einsum, (a, b), bias, equation, out_dtype)


def _contract_on_xla(
    a: Tensor, b: Tensor, bias: Tensor | None, equation: str, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    def einsum(equation: str, *operands: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.einsum.default.redispatch(_OF_XLA, equation, list(operands))
        return found

    return _computed(einsum, (a, b), bias, equation, out_dtype)


def _computed(
    einsum: Callable[..., Tensor],
    operands: tuple[Tensor, Tensor],
    bias: Tensor | None,
    equation: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    dtype = operands[0].dtype
    if bias is None and out_dtype in (None, dtype):
        return einsum(equation, *operands)
    # The TPU's compiler folds the widening back into the product: one pass over the matrix unit, a float32 result.
    product = einsum(equation, *(x.to(compute_dtype(dtype)) for x in operands))
    return (product if bias is None else product + bias.to(product.dtype)).to(out_dtype or dtype)


def _contract_fake(
    a: Tensor, b: Tensor, bias: Tensor | None, equation: str, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    if a.dtype != b.dtype or not a.dtype.is_floating_point:
        raise TypeError(f"kp::contract: operands {a.dtype}, {b.dtype} must be of one floating-point dtype")
    return a.new_empty(_result_shape(equation, a.shape, b.shape), dtype=out_dtype or a.dtype)


def _result_shape(equation: str, a: torch.Size, b: torch.Size) -> list[int]:
    terms, result = equation.split("->")
    first, second = terms.split(",")
    if (len(first), len(second)) != (len(a), len(b)):
        raise ValueError(f"kp::contract: {equation!r} does not name the dimensions of {list(a)} and {list(b)}")
    sizes = dict(zip(first + second, (*a, *b), strict=True))
    return [sizes[letter] for letter in result]


_library.impl("contract", _contract, "CPU")
_library.impl("contract", _contract_on_xla, "XLA")
torch.library.register_fake("kp::contract", _contract_fake, lib=_library)


@register_flop_formula(torch.ops.kp.contract)
def _flops(a: torch.Size, b: torch.Size, _: object, equation: str, **__: object) -> int:
    """For `torch.utils.flop_counter`: every pair of an element of the result and one that is summed over."""
    first, second = equation.split("->")[0].split(",")
    sizes: dict[str, int] = dict(zip(first + second, (*a, *b), strict=True))
    return 2 * math.prod(sizes.values())
