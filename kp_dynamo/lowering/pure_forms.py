"""Pure forms of functional operators that torch_xla 2.9 implements by writing to an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kp_dynamo.lowering.cast_forms import converted


def _copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`source` in the dtype and shape of `x`."""
    return converted(source, x.dtype).expand(x.shape).clone()


PURE_FORMS: dict[Any, Callable[..., Any]] = {
    # torch_xla copies over the first argument and returns it, so later reads of the argument see the source.
    torch.ops.aten.copy.default: _copy,
}
