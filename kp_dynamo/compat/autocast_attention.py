"""Let autocast on XLA tensors reach `F.scaled_dot_product_attention`, as it does on the CPU and on CUDA.

torch_xla 2.9's list of operators that run in the narrow dtype lacks it. With rotary positions, which are float32, the
queries and keys of a model under autocast are then float32 and its values bfloat16, and attention raises, in eager too:
so did every such model in `Trainer` with `bf16=True`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def install() -> torch.library.Library:
    """Add the kernel, once. Import torch_xla first."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutocastXLA")
    return library


def _attention(query: Tensor, key: Tensor, value: Tensor, *masks: Any, **settings: Any) -> Tensor:
    """Masks keep their dtype: the least float32, which masks often hold, is minus infinity in bfloat16."""
    dtype = torch.get_autocast_dtype("xla")
    query, key, value = (cast_by_autocast(x, dtype) for x in (query, key, value))
    with torch._C._DisableAutocast():
        return F.scaled_dot_product_attention(query, key, value, *masks, **settings)


def cast_by_autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast does: neither float64 nor numbers that are not floats are cast."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
