"""What the memory manager tells, and what it must be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kp_dynamo.exceptions import TPUMemoryError


@dataclass(frozen=True)
class TPUMemoryStats:
    """One look at the memory of the device; all memory in bytes.

    Attributes:
        source: "xla": allocated, available and peak are XLA's own figures of the device. "accounting": the device
            does not count (XLA's CPU device); they are those of the tensors that this manager has given out.
        allocated_memory: In use.
        reserved_memory: Of the buffers in this manager's pools, idle and lent; part of what is allocated.
        available_memory: What may be given out still: the total x `memory_fraction`, less what is allocated.
        total_memory: The device's, as XLA says, else that of the configured chip.
        peak_memory: The most that was in use.
        memory_fraction: The share of the total that may be used, as configured.
        active_tensors: Tensors of this manager that are alive.
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
    """A tensor that was given out.

    Attributes:
        timestamp: Seconds since the epoch.
        shape: Its sizes.
        dtype: Its dtype.
        num_bytes: Its memory.
    """

    timestamp: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


def checked_shape(shape: object) -> tuple[int, ...]:
    """A tensor's sizes.

    Raises:
        TPUMemoryError: Anything but whole numbers from 0 on.
    """
    if isinstance(shape, tuple | list) and all(_is_size(size) for size in shape):
        return tuple(shape)
    raise TPUMemoryError(f"the shape is {shape!r}; allowed: a tuple of ints >= 0 such as (512, 512)")


def checked_dtype(dtype: object) -> torch.dtype:
    """A dtype.

    Raises:
        TPUMemoryError: Anything else.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    raise TPUMemoryError(f"the dtype is {dtype!r}; allowed: a torch.dtype such as torch.float32")


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0
