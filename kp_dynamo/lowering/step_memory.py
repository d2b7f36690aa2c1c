"""What a step holds in memory while one of its programs runs, observed in a run on fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Owner(NamedTuple):
    """What a live tensor is.

    Attributes:
        kind: "parameters", "buffers", "inputs", "activations" or "gradients".
        module: The path of its module, as in the graph that computes it; "" if unknown.
        program: The `ExportedProgram` that computes it; None for parameters, buffers and inputs.
        run: Which run of the program in the step, from 0.
    """

    kind: str
    module: str = ""
    program: Any = None
    run: int = 0


Live = tuple[tuple[Owner, int], ...]
"""Live tensors: what each is, and its bytes."""

_INPUT = Owner("inputs")


class StepMemory:
    """Follows the tensors that programs return, until they are dropped; those of autograd too.

    Args:
        bytes_of: The bytes that one chip holds of a tensor; by default, those of its storage.
    """

    def __init__(self, bytes_of: Callable[[torch.Tensor], int] | None = None) -> None:
        self._bytes_of = bytes_of or _storage_bytes
        self._computed: dict[int, tuple[StorageWeakRef, int, Owner]] = {}
        self._given: dict[int, int] = {}
        self._owners: dict[int, Owner] = {}

    def own(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Say what a tensor is that no program computes; by default it is an input."""
        self._owners[tensor.untyped_storage()._cdata] = owner

    @property
    def given_bytes(self) -> int:
        """Bytes of the arguments so far that no program computed: parameters, buffers and inputs."""
        return sum(self._given.values())

    @property
    def given(self) -> Live:
        """The same, tensor by tensor."""
        return tuple((self._owners.get(key, _INPUT), size) for key, size in self._given.items())

    @property
    def computed(self) -> Live:
        """The tensors that programs computed and the step still held at the last call of `beside`."""
        return tuple((owner, size) for _, size, owner in self._computed.values())

    def beside(self, args: Iterable[Any]) -> int:
        """Bytes that are held beside the arguments of a call.

        They do not include parameters and inputs: `given_bytes` is to be added, when all calls are known.
        """
        own = dict(self._storages(args))
        self._computed = {key: found for key, found in self._computed.items() if not found[0].expired()}
        given = {key: size for key, (_, size) in own.items() if key not in self._computed}
        self._given |= given
        others = sum(size for key, (_, size, _) in self._computed.items() if key not in own)
        return others - sum(given.values())

    def add(self, results: Sequence[Any], owners: Sequence[Owner] = ()) -> None:
        """Results of a program, which may be some of its arguments, and what each is."""
        for result, owner in itertools.zip_longest(results, owners, fillvalue=Owner("activations")):
            for key, (storage, size) in self._storages([result]):
                if key not in self._given:
                    self._computed.setdefault(key, (StorageWeakRef(storage), size, owner))

    def _storages(self, values: Iterable[Any]) -> Iterator[tuple[int, tuple[torch.UntypedStorage, int]]]:
        for value in values:
            if isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape):
                storage = value.untyped_storage()
                yield storage._cdata, (storage, self._bytes_of(value))


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
