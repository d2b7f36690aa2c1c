"""Powers of complex numbers, computed as eager does: exp(w log z).

torch_xla 2.9's own are NaN wherever the logarithm of the base or the exponent is infinite (0 ** (1 + 3j)), lose the
smaller part of square roots, and run on the CPU for complex exponents that are numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering import complex_inverses as inverses
from kp_dynamo.lowering.complex_functions import exp
from kp_dynamo.lowering.complex_parts import Parts, join, split, times
from kp_dynamo.lowering.elementwise_forms import ELEMENTWISE_FORMS
from kp_dynamo.lowering.integer_forms import INTEGER_FORMS

aten = torch.ops.aten


def _power(real_form: Callable[..., Any]) -> Callable[..., Any]:
    def power(base: Any, exponent: Any) -> Any:
        dtype = torch.result_type(base, exponent)
        if not dtype.is_complex:
            return real_form(base, exponent)
        if not isinstance(exponent, torch.Tensor) and (simple := _SIMPLE.get(exponent)) is not None:
            return simple(base.to(dtype))
        if not isinstance(base, torch.Tensor) and base == 1:
            return torch.ones_like(exponent, dtype=dtype)
        like = base if isinstance(base, torch.Tensor) else exponent
        z, w = (_parts(x, like, dtype) for x in (base, exponent))
        return join(*exp(*times(w, inverses.log(*z))))

    return power


def _parts(x: Any, like: torch.Tensor, dtype: torch.dtype) -> Parts:
    if isinstance(x, torch.Tensor):
        return split(x.to(dtype))
    zero = torch.zeros_like(like.real if like.is_complex() else like, dtype=dtype.to_real())
    return zero + complex(x).real, zero + complex(x).imag


def _square_root(form: Callable[[torch.Tensor, torch.Tensor], Parts]) -> Callable[[torch.Tensor], torch.Tensor]:
    def root(z: torch.Tensor) -> torch.Tensor:
        return join(*form(*split(z)))

    return root


# The exponents that ATen gives other kernels.
_SIMPLE: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    0: torch.ones_like,
    1: torch.clone,
    2: lambda z: z * z,
    3: lambda z: z * z * z,
    -1: torch.reciprocal,
    -2: lambda z: (z * z).reciprocal(),
    0.5: _square_root(inverses.sqrt),
    -0.5: _square_root(inverses.rsqrt),
}

COMPLEX_POWERS: dict[Any, Callable[..., Any]] = {
    op: _power(real_form)
    for op, real_form in (
        (aten.pow.Tensor_Tensor, INTEGER_FORMS[aten.pow.Tensor_Tensor]),
        (aten.pow.Tensor_Scalar, ELEMENTWISE_FORMS[aten.pow.Tensor_Scalar]),
        (aten.pow.Scalar, INTEGER_FORMS[aten.pow.Scalar]),
    )
}
