"""Statistics that the memory manager reports, and checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kp_dynamo.exceptions import TPUMemoryError


@dataclass(frozen=True)
class TPUMemoryStats:
    """One sample of the device memory, in bytes.

    Attributes:
        source: "xla": allocated, available and peak are XLA's own figures for the device. "accounting": the device
            reports none (XLA's CPU device), so they count the tensors that this manager allocated.
        allocated_memory: Memory in use.
        reserved_memory: Memory of this manager's pool buffers, idle and in use; part of `allocated_memory`.
        available_memory: Memory that can still be allocated: the total x `memory_fraction`, less what is allocated.
        total_memory: Memory of the device as XLA reports it, else that of the configured chip.
        peak_memory: Maximum memory in use so far.
        memory_fraction: The configured share of the total that may be used.
        active_tensors: Live tensors that this manager allocated.
        timestamp: Seconds since the epoch.
    """

    source: Literal["xla", "accounting"]
    allocated_memory: int
    reserved_memory: int
    available_memory: int
    total_memory: int
    peak_memory: int
    memory_fraction: float
    active_tensors: int
    timestamp: float


@dataclass(frozen=True)
class Allocation:
    """An allocated tensor.

    Attributes:
        timestamp: Time of the allocation, in seconds since the epoch.
        shape: Its shape.
        dtype: Its dtype.
        num_bytes: Its memory.
    """

    timestamp: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


def checked_shape(shape: object) -> tuple[int, ...]:
    """`shape` as a tuple.

    Raises:
        TPUMemoryError: It is not a sequence of ints >= 0.
    """
    if isinstance(shape, tuple | list) and all(_is_size(size) for size in shape):
        return tuple(shape)
    raise TPUMemoryError(f"shape={shape!r} is invalid. Allowed: a tuple of ints >= 0 such as (512, 512).")


def checked_dtype(dtype: object) -> torch.dtype:
    """`dtype`, if it is a torch.dtype.

    Raises:
        TPUMemoryError: It has another type.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    raise TPUMemoryError(f"dtype={dtype!r} is invalid. Allowed: a torch.dtype such as torch.float32.")


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0
