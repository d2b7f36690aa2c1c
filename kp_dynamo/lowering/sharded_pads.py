"""Pads of sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _padded(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
    """A pad with negative sizes, which cut, as slices and a pad without them.

    If one side is padded by what the other cuts, and a reader is sharded, XLA's partitioner (torch_xla 2.9) puts values
    of the cut end in place of the padding.
    """
    last = x.dim() - 1
    for number, size in enumerate(pad):
        dim = last - number // 2
        if size < 0:
            start, length = (0 if number % 2 else -size), x.shape[dim] + size
            x = x.narrow(dim, start, length)
    grown = [max(size, 0) for size in pad]
    return aten.constant_pad_nd.default(x, grown, value) if any(grown) else x.clone()


SHARDED_PADS = {aten.constant_pad_nd.default: _padded}
