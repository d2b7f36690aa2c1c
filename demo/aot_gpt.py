"""The GPT of the demo, larger and without memory, for `make aot`: its compile for a TPU needs no values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from demo.model import Gpt


def make() -> tuple[nn.Module, tuple[Tensor]]:
    """Four blocks of width 768, and four rows of 512 tokens."""
    with torch.device("meta"):
        return Gpt(num_layers=4, width=768, num_heads=12, num_tokens=8192), (torch.empty(4, 512, dtype=torch.int64),)
