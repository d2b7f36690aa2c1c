"""Copy results back to the CPU in one transfer, with eager's strides."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.graph.symbol_values import Values, evaluated

Strides = tuple[int, ...] | None


def strides_of(value: object, values: Values, eager: Sequence[Any] | None = None) -> Strides:
    """The strides of a result in eager; None if it is not a tensor, or its layout is unknown.

    Args:
        value: The fake tensor of the result.
        values: The values of the symbols in its strides, for one call.
        eager: Its strides in eager, if they are known to differ from the fake tensor's.
    """
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    for strides in (eager, value.stride()):
        with contextlib.suppress(KeyError):
            if strides is not None:
                return tuple(evaluated(step, values) for step in strides)
    return None


def to_host(results: Sequence[Any], strides: Sequence[Strides]) -> list[Any]:
    """Results on the CPU, with eager's layout."""
    on_device = [_as_pairs(r) for r in results if _is_on_device(r)]
    # torch_xla 2.9: one synchronization for all of them; `.cpu()` synchronizes once per tensor.
    fetched = iter(xla.xlac()._xla_get_cpu_tensors(on_device) if on_device else [])
    moved = [_from_pairs(next(fetched), r) if _is_on_device(r) else r for r in results]
    return [_laid_out(r, stride) for r, stride in zip(moved, strides, strict=True)]


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """torch_xla 2.9 drops the imaginary part when it fetches complex128, but fetches pairs of float64 correctly."""
    return torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor


def _from_pairs(fetched: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(fetched.contiguous()) if original.dtype == torch.complex128 else fetched


def _laid_out(value: Any, stride: Strides) -> Any:
    """`value` with eager's strides: permuted, with holes or expanded. Results with other overlaps are unchanged."""
    if not isinstance(value, torch.Tensor) or stride is None:
        return value
    if value.stride() == stride or _overlaps(value.shape, stride):
        return value
    result = torch.empty_strided(value.shape, stride, dtype=value.dtype, device="cpu")
    # Expanded dimensions hold one value, which is written once.
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    result[once].copy_(value[once])
    return result


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements share memory other than through an expanded dimension."""
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if s != 0 and n > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
