"""The fake tensors of a region of a graph, for another call of the region."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


class CopiedValues:
    """Copies fake tensors: two copies share memory exactly if the two tensors do.

    With the tensors themselves, the values of different calls would seem to share memory, and a write to one of them
    to change all.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: dict[int, Any] = {}

    def replace(self, tensor: Any, other: Any) -> None:
        """Use `other` as the copy of `tensor`, and its memory for the tensors that share memory with `tensor`."""
        if not isinstance(tensor, torch.Tensor) or not isinstance(other, torch.Tensor):
            return  # a number, or an attribute of the graph, which has no fake tensor
        self._copies.setdefault(id(tensor), other)
        if _is_copied(tensor):
            self._storages.setdefault(tensor.untyped_storage()._cdata, other.untyped_storage())

    def of(self, value: Any) -> Any:
        """A copy of a tensor, or of a tree of tensors."""
        return pytree.tree_map_only(torch.Tensor, self._of_tensor, value)

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = self._copy(tensor) if _is_copied(tensor) else tensor
        found: torch.Tensor = self._copies[id(tensor)]
        return found

    def _copy(self, tensor: FakeTensor) -> torch.Tensor:
        with tensor.fake_mode, torch.inference_mode(tensor.is_inference()), torch.no_grad():
            storage = tensor.untyped_storage()
            if storage._cdata not in self._storages:
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=tensor.device)
                self._storages[storage._cdata] = memory.untyped_storage()
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy.set_(self._storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
            return copy.requires_grad_(tensor.requires_grad)


def _is_copied(value: Any) -> TypeGuard[FakeTensor]:
    """Whether a value is a fake tensor with plain memory: not sparse, conjugated, or of a transform of torch.func."""
    return type(value) is FakeTensor and value.layout is torch.strided and not value.is_conj() and not value.is_neg()
