"""Indexing by tensors that are separated by whole dimensions, which torch_xla 2.9 reads from the wrong memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _index(op: Any) -> Callable[..., Any]:
    """`x[a, :, b]`, as `x.permute(0, 2, 1)[a, b]`: ATen puts the indexed dimensions first as well.

    torch_xla's `TransposeToFront` permutes inside its kernel. That permutation is a view of the memory of `x`, and
    forgets where `x` is a slice of another tensor: `x[:, 1:][a, :, b]` had the elements of another slice.
    """

    def form(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
        indexed = [dim for dim, index in enumerate(indices) if index is not None]
        is_adjacent = indexed[-1] - indexed[0] + 1 == len(indexed)
        if is_adjacent or any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            return op(x, indices)
        whole = [dim for dim in range(x.dim()) if dim not in indexed]
        return op(x.permute(*indexed, *whole), [indices[dim] for dim in indexed])

    return form


INDEX_FORMS: dict[Any, Callable[..., Any]] = {op: _index(op) for op in (aten.index.Tensor, aten._unsafe_index.Tensor)}
