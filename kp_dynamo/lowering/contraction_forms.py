"""The form of `kp::contract` for operands that take several passes over the MXU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.compat import xla


def _contract(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    equation: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A matmul of matrices: torch_xla 2.9 lowers an einsum without the matmul precision, so in one pass."""
    if a.dtype.itemsize < torch.float32.itemsize or xla.xlac()._xla_get_mat_mul_precision() == "default":
        return torch.ops.kp.contract(a, b, bias, equation, out_dtype=out_dtype)  # type: ignore[no-any-return]
    operands, order = equation.split("->")
    first, second = operands.split(",")
    summed = [letter for letter in first if letter in second]
    found = torch.tensordot(a, b, ([first.index(c) for c in summed], [second.index(c) for c in summed]))
    kept = [letter for letter in first + second if letter not in summed]
    found = found.permute([kept.index(letter) for letter in order])
    result: torch.Tensor = (found if bias is None else found + bias).to(out_dtype or a.dtype)
    return result


CONTRACTION_FORMS: dict[Any, Callable[..., Any]] = {torch.ops.kp.contract.default: _contract}
