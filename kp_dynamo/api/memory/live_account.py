"""Bytes of the tensors that were given out and are still alive."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class LiveAccount:
    """Counts storages, not tensors: a view keeps the memory when the tensor it was taken from is gone.

    Holds them weakly: what nobody else holds is not counted. Thread-safe.
    """

    def __init__(self) -> None:
        self._bytes: Any = WeakIdKeyDictionary()  # storage -> its bytes
        self._lock = threading.Lock()
        self._peak = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the memory of `tensor` from now on, for as long as it lives."""
        storage = tensor.untyped_storage()
        with self._lock:
            self._bytes[storage] = storage.nbytes()
            self._peak = max(self._peak, sum(self._bytes.values()))

    def num_bytes(self) -> int:
        """Bytes alive."""
        with self._lock:
            return sum(self._bytes.values())

    def num_tensors(self) -> int:
        """Storages alive."""
        with self._lock:
            return len(list(self._bytes.values()))

    def peak_bytes(self) -> int:
        """The most bytes that were alive when a tensor was added."""
        return self._peak
