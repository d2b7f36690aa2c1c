"""float64 in full: torch_xla 2.9 writes the constants of some operators as float32, for every dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


@functools.cache
def float64_decompositions() -> dict[Any, Callable[..., Any]]:
    """Forms of these operators that hold for float64 tensors; others keep torch_xla's."""
    forms: dict[Any, Callable[..., Any]] = {
        aten.log2.default: lambda x: x.log() / math.log(2),
        aten.log10.default: lambda x: x.log() / math.log(10),
    }
    return {op: _for_float64(form) for op, form in forms.items()}


def _for_float64(form: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return form(x, *args, **kwargs) if x.dtype == torch.float64 else NotImplemented

    return chosen
