"""Results on their way back to the CPU: fetched in one transfer, with the strides that eager gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import hint_int

from kp_dynamo import compat


@dataclass(frozen=True)
class Layout:
    """How eager lays a result out.

    Attributes:
        stride: Its strides; None where they depend on the shapes of the call.
        order: Then: its dimensions from the outermost to the innermost, but for expanded ones.
    """

    stride: tuple[int, ...] | None
    order: tuple[int, ...]

    @classmethod
    def of(cls, value: object) -> Layout | None:
        """The layout of a fake tensor; None for what is not a tensor, or has an unknown layout."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        if not any(isinstance(s, torch.SymInt) for s in value.stride()):
            return cls(value.stride(), ())
        hints = [hint_int(s, fallback=0) for s in value.stride()]
        laid = [dim for dim, step in enumerate(value.stride()) if isinstance(step, torch.SymInt) or step != 0]
        return cls(None, tuple(sorted(laid, key=lambda dim: -hints[dim])))

    def strides_for(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The strides of a result of this shape."""
        if self.stride is not None:
            return self.stride
        strides, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            strides[dim], step = step, step * max(shape[dim], 1)
        return tuple(strides)


def to_host(results: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
    """Results on the CPU, laid out as eager would."""
    on_device = [_as_pairs(r) for r in results if _is_on_device(r)]
    # torch_xla 2.9: one synchronisation for all of them; `.cpu()` makes one each.
    fetched = iter(compat.xlac()._xla_get_cpu_tensors(on_device) if on_device else [])
    moved = [_from_pairs(next(fetched), r) if _is_on_device(r) else r for r in results]
    return [_laid_out(r, layout) for r, layout in zip(moved, layouts, strict=True)]


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def _as_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """torch_xla 2.9 fetches complex128 without its imaginary part; pairs of float64 arrive whole."""
    return torch.view_as_real(tensor) if tensor.dtype == torch.complex128 else tensor


def _from_pairs(fetched: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(fetched.contiguous()) if original.dtype == torch.complex128 else fetched


def _laid_out(value: Any, layout: Layout | None) -> Any:
    """`value` permuted, with holes or expanded as eager has it. Other overlaps stay as they are."""
    if not isinstance(value, torch.Tensor) or layout is None or value.numel() <= 1:
        return value
    stride = layout.strides_for(value.shape)
    if value.stride() == stride or _overlaps(value.shape, stride):
        return value
    result = torch.empty_strided(value.shape, stride, dtype=value.dtype)
    # Expanded dimensions hold one value: it is written once.
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)
    result[once].copy_(value[once])
    return result


def _overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two places share memory in another way than by an expanded dimension."""
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if s != 0 and n > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
