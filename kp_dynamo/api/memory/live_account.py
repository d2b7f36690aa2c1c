"""Counts the bytes of allocated tensors that are still alive."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class LiveAccount:
    """Counts storages, not tensors, because a view keeps the memory of its base alive.

    Storages are referenced weakly and counted while something else references them. Thread-safe.
    """

    def __init__(self) -> None:
        self._bytes: Any = WeakIdKeyDictionary()  # storage -> its bytes
        self._lock = threading.Lock()
        self._peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the memory of `tensor` for as long as it is alive."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._bytes[storage] = storage.nbytes()
            self._peak = max(self._peak, sum(self._bytes.values()))

    def num_bytes(self) -> int:
        """Bytes of the live storages."""
        with self._lock:
            return sum(self._bytes.values())

    def num_tensors(self) -> int:
        """Number of live storages."""
        with self._lock:
            return len(list(self._bytes.values()))

    def peak_bytes(self) -> int:
        """Maximum live bytes at the time a tensor was added."""
        return self._peak
