"""Functional operators that torch_xla 2.9 carries out by writing to an argument, as forms that only return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`source` in the dtype and shape of `x`."""
    return source.to(x.dtype).expand(x.shape).clone()


PURE_FORMS: dict[Any, Callable[..., torch.Tensor]] = {
    # Copies over its first argument and returns it: from then on the argument is read as the source.
    torch.ops.aten.copy.default: _copy,
}
