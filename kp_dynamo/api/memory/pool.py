"""A bounded number of equal buffers that are lent, and lent again."""

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
    """What the buffers of a pool are.

    Attributes:
        shape: Of each.
        dtype: Of each.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of one buffer."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorPool:
    """At most `size` buffers of one kind; each is made when it is first needed. Thread-safe.

    A buffer that its borrower drops instead of giving it back is gone, and its place is free again.

    Args:
        name: For messages.
        size: How many buffers there may be.
        kind: What they are.
        make: Makes one; what it raises reaches the borrower.
    """

    def __init__(self, name: str, size: int, kind: BufferKind, make: Callable[[], torch.Tensor]) -> None:
        self.kind, self._name, self._size, self._make = kind, name, size, make
        self._idle: list[torch.Tensor] = []
        self._lent: dict[int, weakref.ref[torch.Tensor]] = {}
        self._num_made = self._num_reused = 0
        self._lock = threading.RLock()

    def take(self) -> torch.Tensor:
        """A buffer that nobody else has; one used before holds what its last borrower left in it, a new one zeros.

        Raises:
            TPUMemoryPoolError: All are lent.
        """
        with self._lock:
            self._forget_dropped()
            if not self._idle and len(self._lent) >= self._size:
                raise TPUMemoryPoolError(
                    f"{self._name} is exhausted: all {self._size} of its tensors are lent. Return one with "
                    "return_tensor_to_pool, drop one, or make a larger pool."
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
        """Take a buffer back, without its gradient and history.

        Returns:
            "" where it was taken, else why it was not.
        """
        with self._lock:
            lent = self._lent.pop(id(tensor), None)
            if lent is None or lent() is not tensor:
                is_idle = any(tensor is idle for idle in self._idle)
                return "it has been returned before" if is_idle else "it is not of this pool"
            if (tuple(tensor.shape), tensor.dtype) != (self.kind.shape, self.kind.dtype):
                return f"it has become {tensor.dtype}{list(tensor.shape)}; its place in the pool is free again"
            tensor.grad = None
            self._idle.append(tensor.detach_())
            return ""

    def drop_idle(self) -> int:
        """Let go of the buffers that nobody has; returns their bytes. Made anew when they are needed."""
        with self._lock:
            freed = len(self._idle) * self.kind.num_bytes
            self._idle.clear()
            return freed

    def held_bytes(self) -> int:
        """Of all buffers there are, idle and lent."""
        with self._lock:
            self._forget_dropped()
            return (len(self._idle) + len(self._lent)) * self.kind.num_bytes

    def get_stats(self) -> dict[str, Any]:
        """All of one moment: `utilization` is lent / size."""
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
