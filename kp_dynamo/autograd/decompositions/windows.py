"""The backward of `Tensor.unfold`, which `istft` computes too, as sums of shifted windows: torch 2.9 scatters elements.

Windows of `size` every `step` elements are made of chunks of gcd(size, step) elements. The chunks at one place of all
windows are apart by a whole number of chunks, so they are padded and added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kp_dynamo.ops.compute_dtype import compute_dtype

aten = torch.ops.aten

_MOST_SUMS = 64


def window_decompositions(torchs: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """The decomposition of `unfold_backward`, which uses torch's where a size varies or sums are too many."""
    return {aten.unfold_backward.default: partial(_unfold_backward, torchs[aten.unfold_backward.default])}


def _unfold_backward(torchs: Any, gradient: torch.Tensor, sizes: Sequence[Any], dim: int, size: Any, step: Any) -> Any:
    """[..., windows, ..., size] -> [..., L, ...]."""
    numbers = (*gradient.shape, *sizes, size, step)
    if not sizes or not all(isinstance(number, int) and number > 0 for number in numbers):
        return torchs(gradient, sizes, dim, size, step)
    chunk = math.gcd(size, step)
    per_window, per_step = size // chunk, step // chunk
    if per_window > _MOST_SUMS:
        return torchs(gradient, sizes, dim, size, step)
    dim %= len(sizes)
    is_narrow = gradient.dtype in (torch.bfloat16, torch.float16)
    windows = gradient.to(compute_dtype(gradient.dtype)) if is_narrow else gradient
    windows = windows.movedim(-1, dim + 1).unflatten(dim + 1, (per_window, chunk))
    last = (gradient.shape[dim] - 1) * per_step + 1
    parts = (_spread(windows.select(dim + 1, i), dim, per_step, last) for i in range(per_window))
    chunks = sum(_padded(part, dim, i, per_window - 1 - i) for i, part in enumerate(parts))
    assert isinstance(chunks, torch.Tensor)
    whole = chunks.flatten(dim, dim + 1)
    return _padded(whole, dim, 0, sizes[dim] - whole.shape[dim]).to(gradient.dtype).contiguous()


def _spread(chunks: torch.Tensor, dim: int, step: int, length: int) -> torch.Tensor:
    """Zeros between the chunks, so that they are `step` apart."""
    if step == 1:
        return chunks
    return _padded(chunks.unsqueeze(dim + 1), dim + 1, 0, step - 1).flatten(dim, dim + 1).narrow(dim, 0, length)


def _padded(x: torch.Tensor, dim: int, before: int, after: int) -> torch.Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [before, after]) if before or after else x
