"""Bytes of the values of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int


def node_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor, or of all of its tensors; symbolic sizes by their hints, unknown ones as 1."""
    return _bytes(node.meta.get("val"))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.element_size() * hint_int(value.numel(), fallback=1)
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0
