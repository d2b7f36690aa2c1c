"""A model and its arguments without their memory: the same module with fake tensors in the place of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kp_dynamo.exceptions import TPUModelPreparationError


class Fakes:
    """Makes fake CPU tensors of the shapes of others, one a tensor, so that ties stay ties.

    Real tensors may be anywhere; those on the meta device have no memory to begin with.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []  # an id is free again once its tensor has gone

    def model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """A copy of a module on fake parameters and buffers; a plain function as it is."""
        if not isinstance(model, nn.Module):
            return model
        memo: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            memo[id(tensor)] = self.tensor(tensor)
        try:
            return copy.deepcopy(model, memo)
        except Exception as cause:
            raise TPUModelPreparationError(
                f"{type(model).__name__} cannot be copied ({type(cause).__name__}: {cause}), and compiling ahead of "
                "time works on a copy. Make copy.deepcopy(model) work, or drop what it cannot copy from the module."
            ) from cause

    def arguments(self, args: Any) -> Any:
        """Arguments, nested or not, with every tensor replaced."""
        return torch.utils._pytree.tree_map_only(torch.Tensor, self.tensor, args)

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake of a tensor."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = self._fake(tensor)
            self._alive.append(tensor)
        return self._made[id(tensor)]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise TPUModelPreparationError(
                f"a tensor of shape {tuple(tensor.shape)} has layout {tensor.layout}, which XLA does not have. "
                "Allowed: dense tensors."
            )
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        _copy_marks(tensor, fake)
        return fake.requires_grad_(tensor.requires_grad)


# What torch 2.9's mark_dynamic, maybe_mark_dynamic and mark_static leave on a tensor.
_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_hint_overrides",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_static_indices",
)


def _copy_marks(tensor: torch.Tensor, fake: torch.Tensor) -> None:
    for mark in _MARKS:
        if hasattr(tensor, mark):
            setattr(fake, mark, getattr(tensor, mark))
