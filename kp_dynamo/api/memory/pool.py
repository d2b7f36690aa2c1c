"""A bounded pool of equal, reusable buffers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kp_dynamo.exceptions import TPUMemoryPoolError


@dataclass(frozen=True)
class BufferKind:
    """Shape and dtype of the buffers of a pool.

    Attributes:
        shape: Shape of each buffer.
        dtype: Dtype of each buffer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one buffer."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorPool:
    """At most `size` buffers of one kind, each allocated on first use. Thread-safe.

    A buffer that is dropped instead of returned is freed, and its place in the pool becomes available.

    Args:
        name: Name for messages.
        size: Maximum number of buffers.
        kind: Shape and dtype of the buffers.
        make: Allocates a buffer; its exceptions propagate to the caller of `take`.
    """

    def __init__(self, name: str, size: int, kind: BufferKind, make: Callable[[], torch.Tensor]) -> None:
        self.kind, self._name, self._size, self._make = kind, name, size, make
        self._idle: list[torch.Tensor] = []
        self._lent: dict[int, weakref.ref[torch.Tensor]] = {}
        self._num_made = self._num_reused = 0
        self._lock = threading.RLock()

    def take(self) -> torch.Tensor:
        """Take a free buffer; a reused one keeps its old values, a new one is zero.

        Raises:
            TPUMemoryPoolError: All buffers are in use.
        """
        with self._lock:
            self._forget_dropped()
            if not self._idle and len(self._lent) >= self._size:
                raise TPUMemoryPoolError(
                    f"{self._name} is exhausted: all {self._size} of its tensors are in use. Try: return one with "
                    "return_tensor_to_pool, drop one, or create a larger pool."
                )
            if self._idle:
                self._num_reused += 1
                tensor = self._idle.pop()
            else:
                tensor = self._make()
                self._num_made += 1
            self._lent[id(tensor)] = weakref.ref(tensor)
            return tensor

    def give_back(self, tensor: torch.Tensor) -> str:
        """Accept a buffer back, and clear its gradient and autograd history.

        Returns:
            "" if it was accepted, else the reason why not.
        """
        with self._lock:
            lent = self._lent.pop(id(tensor), None)
            if lent is None or lent() is not tensor:
                is_idle = any(tensor is idle for idle in self._idle)
                return "it was already returned" if is_idle else "it is not from this pool"
            if (tuple(tensor.shape), tensor.dtype) != (self.kind.shape, self.kind.dtype):
                return f"it is now {tensor.dtype}{list(tensor.shape)}; its place in the pool is free again"
            tensor.grad = None
            self._idle.append(tensor.detach_())
            return ""

    def drop_idle(self) -> int:
        """Free the idle buffers and return their bytes; they are allocated again when needed."""
        with self._lock:
            freed = len(self._idle) * self.kind.num_bytes
            self._idle.clear()
            return freed

    def held_bytes(self) -> int:
        """Bytes of all buffers, idle and in use."""
        with self._lock:
            self._forget_dropped()
            return (len(self._idle) + len(self._lent)) * self.kind.num_bytes

    def get_stats(self) -> dict[str, Any]:
        """A consistent snapshot; `utilization` is lent / size."""
        with self._lock:
            self._forget_dropped()
            return {
                "pool_size": self._size,
                "tensor_size": self.kind.shape,
                "dtype": self.kind.dtype,
                "lent": len(self._lent),
                "idle": len(self._idle),
                "utilization": len(self._lent) / self._size,
                "tensors_made": self._num_made,
                "times_reused": self._num_reused,
                "reserved_bytes": self.held_bytes(),
            }

    def _forget_dropped(self) -> None:
        self._lent = {key: lent for key, lent in self._lent.items() if lent() is not None}
