"""The bytes of a tensor, whatever its dtype and strides."""

from __future__ import annotations

import torch


def tensor_bytes(dense: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8 [number of bytes]; not a copy."""
    # A contiguous tensor of one element may have any stride, which `view` refuses.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
