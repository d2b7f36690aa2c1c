"""What the memory manager reports, and the kinds of buffers that it gives out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from kp_dynamo.exceptions import TPUMemoryError


@dataclass(frozen=True)
class TPUMemoryStats:
    """One sample of the device memory, in bytes.

    Attributes:
        source: "xla": allocated, available, total and peak are XLA's own figures for the device. "accounting": the
            device reports none (XLA's CPU device), so they count the tensors that this manager allocated, and the total
            is that of the configured chip.
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
    peak_memory: int
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


class BufferKind(NamedTuple):
    """Shape and dtype of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: object, dtype: object) -> BufferKind:
        """Both, checked; raises TPUMemoryError if one is invalid."""
        if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
            raise TPUMemoryError(f"shape={shape!r} is invalid. Allowed: a tuple of ints >= 0 such as (512, 512).")
        if not isinstance(dtype, torch.dtype):
            raise TPUMemoryError(f"dtype={dtype!r} is invalid. Allowed: a torch.dtype such as torch.float32.")
        return cls(tuple(shape), dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of one buffer."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"
