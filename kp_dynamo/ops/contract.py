"""`kp::contract`: an einsum-style contraction over any dimensions, rounded once at the end.

    contract(a, b, bias, equation, *, out_dtype) -> result, of the dtype of a and b or of `out_dtype`

"bsk,nk->bns" is x [B, S, K] times a weight [N, K], with the features before the positions. A letter occurs in two of
the three terms, or as a batch in all three, once per term. `bias` broadcasts to the result. Sums, also the one with the
bias, are float32 (float64 for float64 operands) before they are rounded.

ATen only has matmuls of matrices and of batches of them. Flattening [B, S, K] to [B * S, K] for one fixes the layout
that the TPU's compiler gives the result: see `passes/fold_views.py`, which inserts this operator into graphs after
autograd. The operator has no derivative.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kp_dynamo.ops.compute_dtype import compute_dtype

_library = torch.library.Library("kp", "FRAGMENT")
_library.define(
    "contract(Tensor a, Tensor b, Tensor? bias, str equation, *, ScalarType? out_dtype=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)

# torch_xla 2.9 has its own einsum, which is one XLA dot, at the AutogradXLA key. Below that key ATen decomposes an
# einsum into the flattened matmul that this operator avoids.
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
    # The TPU's compiler folds the upcast back into the contraction: one pass over the MXU, with a float32 result.
    result = einsum(equation, *(x.to(compute_dtype(dtype)) for x in operands))
    return (result if bias is None else result + bias.to(result.dtype)).to(out_dtype or dtype)


def _contract_fake(
    a: Tensor, b: Tensor, bias: Tensor | None, equation: str, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    if a.dtype != b.dtype or not a.dtype.is_floating_point:
        raise TypeError(f"kp::contract: operands {a.dtype}, {b.dtype} must have the same floating-point dtype")
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
    """For `torch.utils.flop_counter`: a multiply and an add for each combination of indices."""
    first, second = equation.split("->")[0].split(",")
    sizes: dict[str, int] = dict(zip(first + second, (*a, *b), strict=True))
    return 2 * math.prod(sizes.values())
