"""The dtype in which operators compute."""

from __future__ import annotations

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operands of `dtype` are multiplied, scored, activated and gated."""
    return torch.float64 if dtype == torch.float64 else torch.float32
