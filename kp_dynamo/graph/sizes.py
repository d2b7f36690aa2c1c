"""Bytes of the values of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import hint_int


def node_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor, or of all of its tensors; symbolic sizes by their hints, unknown ones as 1."""
    return _bytes(node.meta.get("val"))


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor, counted as in `node_bytes`; 0 for any other value."""
    return value.element_size() * hint_int(value.numel(), fallback=1) if isinstance(value, torch.Tensor) else 0


def _bytes(value: Any) -> int:
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else tensor_bytes(value)
