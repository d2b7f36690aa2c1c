"""A bounded pool of equal tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kp_dynamo.exceptions import TPUMemoryPoolError


class TensorPool:
    """At most `size` tensors of one shape and dtype, each allocated by `make` on first use. Its manager locks.

    A returned tensor is lent again: its place in the budget, the object, and its buffer until someone writes to it in
    place. XLA's buffers are immutable, so torch_xla then gives the tensor a new one and frees the old. A tensor that is
    dropped instead of returned makes room for a new one.
    """

    def __init__(self, name: str, size: int, like: torch.Tensor, make: Callable[[], torch.Tensor]) -> None:
        self._name, self._size, self._like, self._make = name, size, like, make
        self._idle: list[torch.Tensor] = []
        self._lent: Any = WeakIdKeyDictionary()

    def take(self) -> torch.Tensor:
        """Take a free tensor; a reused one keeps its old values, a new one is zero."""
        if not self._idle and len(self._lent) == self._size:
            raise TPUMemoryPoolError(
                f"{self._name} is exhausted: all {self._size} of its tensors are in use. Try: return one with "
                "return_tensor_to_pool, drop one, or create a larger pool."
            )
        tensor = self._idle.pop() if self._idle else self._make()
        self._lent[tensor] = True
        return tensor

    def give_back(self, tensor: torch.Tensor) -> str:
        """Take a tensor back without its gradient and autograd history; returns why not, "" if it was accepted."""
        if tensor not in self._lent:
            is_idle = any(tensor is idle for idle in self._idle)
            return "it was already returned" if is_idle else "it is not from this pool"
        del self._lent[tensor]
        if (tensor.shape, tensor.dtype) != (self._like.shape, self._like.dtype):
            return f"it is now {tensor.dtype}{list(tensor.shape)}; its place in the pool is free again"
        tensor.grad = None
        self._idle.append(tensor.detach_())
        return ""

    def drop_idle(self) -> int:
        """Free the idle tensors and return their bytes; they are allocated again when needed."""
        freed = len(self._idle) * self._like.nbytes
        self._idle.clear()
        return freed

    def get_stats(self) -> dict[str, Any]:
        """Counts and bytes; `utilization` is lent / size."""
        num_lent, num_idle = len(self._lent), len(self._idle)
        return {
            "pool_size": self._size,
            "lent": num_lent,
            "idle": num_idle,
            "utilization": num_lent / self._size,
            "reserved_bytes": (num_idle + num_lent) * self._like.nbytes,
        }
