"""Replace views that torch_xla lowers wrongly by other operators: a program has no views, only values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """[..., n, m] after a permutation -> [..., length of the diagonal]."""
    moved = x.permute(_order(x, dim1, dim2))
    return moved.flatten(-2).index_select(-1, _places(moved, offset))


def _diagonal_scatter(
    x: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """`x` with `source` [..., length] as its diagonal."""
    order = _order(x, dim1, dim2)
    moved = x.permute(order)
    written = moved.flatten(-2).index_copy(-1, _places(moved, offset), source)
    return written.reshape(moved.shape).permute([order.index(d) for d in range(x.dim())])


def _diagonal_backward(gradient: torch.Tensor, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> torch.Tensor:
    return _diagonal_scatter(gradient.new_zeros(sizes), gradient, offset, dim1, dim2)


def _order(x: torch.Tensor, dim1: int, dim2: int) -> list[int]:
    last = dim1 % x.dim(), dim2 % x.dim()
    return [*(d for d in range(x.dim()) if d not in last), *last]


def _places(moved: torch.Tensor, offset: int) -> torch.Tensor:
    """The indices of the diagonal of [..., n, m] in [..., n * m]."""
    n, m = moved.shape[-2:]
    row, column = max(0, -offset), max(0, offset)
    length = max(0, min(n - row, m - column))
    return torch.arange(length, device=moved.device) * (m + 1) + row * m + column


def _as_strided_scatter(
    x: torch.Tensor, source: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """torch_xla writes one block if the last stride is 1. `x` is contiguous; see `passes/memory_places`."""
    places = torch.full([1] * len(size), offset or 0, device=x.device)
    for d, (length, step) in enumerate(zip(size, stride, strict=True)):
        shape = [length if d == other else 1 for other in range(len(size))]
        places = places + (torch.arange(length, device=x.device) * step).reshape(shape)
    return x.reshape(-1).scatter(0, places.reshape(-1), source.reshape(-1)).reshape(x.shape)


VIEW_FORMS: dict[Any, Callable[..., torch.Tensor]] = {
    # From three dimensions on, torch_xla 2.9 puts the diagonal first, but reports the shape that has it last.
    aten.diagonal.default: _diagonal,
    aten.diagonal_copy.default: _diagonal,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.diagonal_backward.default: _diagonal_backward,
    aten.as_strided_scatter.default: _as_strided_scatter,
}
