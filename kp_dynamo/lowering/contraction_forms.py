"""The form of `kp::contract` for operands that take several passes over the MXU."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
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
    """Matmuls of matrices: torch_xla 2.9 lowers an einsum without the matmul precision, so in one pass."""
    if a.dtype.itemsize < torch.float32.itemsize or xla.xlac()._xla_get_mat_mul_precision() == "default":
        return torch.ops.kp.contract(a, b, bias, equation, out_dtype=out_dtype)  # type: ignore[no-any-return]
    found = _as_matrices(a, b, equation)
    result: torch.Tensor = (found if bias is None else found + bias).to(out_dtype or a.dtype)
    return result


def _as_matrices(a: torch.Tensor, b: torch.Tensor, equation: str) -> torch.Tensor:
    """The contraction by one matmul of matrices, or of batches of them."""
    terms, order = equation.split("->")
    first, second = terms.split(",")
    sizes = dict(zip(first + second, (*a.shape, *b.shape), strict=True))
    batch = [letter for letter in first if letter in second and letter in order]
    summed = [letter for letter in first if letter in second and letter not in order]
    rows = [letter for letter in first if letter not in second]
    columns = [letter for letter in second if letter not in first]

    def matrices(x: torch.Tensor, term: str, *groups: list[str]) -> torch.Tensor:
        lengths = [prod(sizes[letter] for letter in group) for group in groups]
        return x.permute([term.index(letter) for group in groups for letter in group]).reshape(lengths)

    if batch:
        found = torch.bmm(matrices(a, first, batch, rows, summed), matrices(b, second, batch, summed, columns))
    else:
        found = torch.mm(matrices(a, first, rows, summed), matrices(b, second, summed, columns))
    letters = [*batch, *rows, *columns]
    return found.reshape([sizes[letter] for letter in letters]).permute([letters.index(letter) for letter in order])


CONTRACTION_FORMS: dict[Any, Callable[..., Any]] = {torch.ops.kp.contract.default: _contract}
