"""What the memory manager reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class TPUMemoryStats:
    """One sample of the device memory, in bytes.

    Attributes:
        source: "xla": `allocated_memory` and `total_memory` are XLA's own figures for the device. "accounting": the
            device reports none (XLA's CPU device). Then `allocated_memory` counts the tensors that this manager
            allocated, and `total_memory` is that of the configured chip.
        reserved_memory: Memory of this manager's pool buffers, idle and in use; part of `allocated_memory`.
        available_memory: The total x `memory_fraction`, less what is allocated.
        active_tensors: Live tensors that this manager allocated.
        timestamp: Seconds since the epoch.
    """

    source: Literal["xla", "accounting"]
    allocated_memory: int
    reserved_memory: int
    available_memory: int
    total_memory: int
    memory_fraction: float
    active_tensors: int
    timestamp: float


@dataclass(frozen=True)
class Allocation:
    """A tensor that was allocated, at `timestamp` in seconds since the epoch."""

    timestamp: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
