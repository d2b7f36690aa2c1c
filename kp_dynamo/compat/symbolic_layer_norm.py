"""Let Dynamo trace `F.layer_norm` on XLA tensors with symbolic sizes.

torch_xla 2.9's kernel at AutogradXLA reads sizes as numbers, and fails on a fake tensor with symbolic sizes. Only for
those, the definition replaces it (Ba, Kiros and Hinton 2016, arXiv:1607.06450). The compiled graph comes from the CPU's
decomposition either way.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch


@functools.cache
def install() -> torch.library.Library:
    """Override the kernel, once. Import torch_xla first."""
    library = torch.library.Library("aten", "IMPL")
    kernel = torch.library.get_kernel("aten::native_layer_norm", "AutogradXLA")

    def layer_norm(keyset: Any, x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
        if any(isinstance(size, torch.SymInt) for size in x.shape):
            return _definition(x, shape, weight, bias, eps)
        return kernel.call_boxed(keyset, x, shape, weight, bias, eps)

    with warnings.catch_warnings():
        # torch warns about every override; this one is intended.
        warnings.simplefilter("ignore", UserWarning)
        library.impl("native_layer_norm", layer_norm, "AutogradXLA", with_keyset=True, allow_override=True)
    return library


def _definition(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., *shape] -> (result, mean, reciprocal standard deviation), statistics in float32."""
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    scaled = centred * rstd if weight is None else centred * rstd * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype), mean, rstd
