"""What a step holds in memory while one of its programs runs, observed in a run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StepMemory:
    """Follows the tensors that programs return, until they are dropped; those of autograd too.

    Args:
        bytes_of: The bytes that one chip holds of a tensor; by default, those of its storage.
    """

    def __init__(self, bytes_of: Callable[[torch.Tensor], int] | None = None) -> None:
        self._bytes_of = bytes_of or _storage_bytes
        self._computed: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, int] = {}

    @property
    def given_bytes(self) -> int:
        """Bytes of the arguments so far that no program computed: parameters, buffers and inputs."""
        return sum(self._given.values())

    def beside(self, args: Iterable[Any]) -> int:
        """Bytes that are held beside the arguments of a call.

        They do not include parameters and inputs: `given_bytes` is to be added, when all calls are known.
        """
        own = dict(self._storages(args))
        self._computed = {key: found for key, found in self._computed.items() if not found[0].expired()}
        given = {key: size for key, (_, size) in own.items() if key not in self._computed}
        self._given |= given
        others = sum(size for key, (_, size) in self._computed.items() if key not in own)
        return others - sum(given.values())

    def add(self, results: Iterable[Any]) -> None:
        """Results of a program, which may be some of its arguments."""
        for key, (storage, size) in self._storages(results):
            if key not in self._given:
                self._computed.setdefault(key, (StorageWeakRef(storage), size))

    def _storages(self, values: Iterable[Any]) -> Iterator[tuple[int, tuple[torch.UntypedStorage, int]]]:
        for value in values:
            if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
                storage = value.untyped_storage()
                yield storage._cdata, (storage, self._bytes_of(value))


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
