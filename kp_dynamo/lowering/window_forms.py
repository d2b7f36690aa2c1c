"""Sliding windows of a dimension, `Tensor.unfold`, which torch_xla 2.9 has no lowering for. `stft` makes its frames so.

Windows of `size` every `step` elements are made of chunks of gcd(size, step) elements: each chunk of a window is a
slice of all chunks. A few slices cost a TPU less than a gather of single elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_MOST_SLICES = 64
"""With more chunks in a window, the elements are gathered: each slice is traced and compiled."""


def _unfold(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    """[..., L, ...] -> [..., windows, ..., size]."""
    if not x.dim():
        return x.reshape(1)[:size].clone()
    dim %= x.dim()
    num = (x.shape[dim] - size) // step + 1
    if not size or not x.numel():
        return x.new_zeros((*x.shape[:dim], num, *x.shape[dim + 1 :], size))
    chunk = math.gcd(size, step)
    windows = _sliced(x, dim, num, size // chunk, step // chunk, chunk)
    if windows is None:
        windows = x.index_select(dim, _places(num, size, step, x.device)).unflatten(dim, (num, size))
    return windows.movedim(dim + 1, -1)


def _sliced(x: torch.Tensor, dim: int, num: int, per_window: int, per_step: int, chunk: int) -> torch.Tensor | None:
    """[..., windows, size, ...]; None if a window has too many chunks.

    Args:
        x: The tensor, at least as long as all windows.
        dim: The dimension with the windows.
        num: The number of windows.
        per_window: Chunks in a window.
        per_step: Chunks from one window to the next.
        chunk: Elements of a chunk.
    """
    if per_window > _MOST_SLICES:
        return None
    num_chunks = (num - 1) * per_step + per_window
    chunks = x.narrow(dim, 0, num_chunks * chunk).unflatten(dim, (num_chunks, chunk))
    last = (num - 1) * per_step + 1
    parts = [aten.slice.Tensor(chunks, dim, i, i + last, per_step) for i in range(per_window)]
    return torch.stack(parts, dim + 1).flatten(dim + 1, dim + 2)


def _places(num: int, size: int, step: int, device: torch.device) -> torch.Tensor:
    starts = torch.arange(num, device=device) * step
    return (starts.unsqueeze(1) + torch.arange(size, device=device)).reshape(-1)


WINDOW_FORMS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.unfold.default: _unfold,
}
