"""Copies a model and its arguments onto fake tensors, which have no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from kp_dynamo.exceptions import TPUModelPreparationError
from kp_dynamo.lowering.known_results import set_known


class _FakeMode(FakeTensorMode):
    """Draws single random numbers that Python code asks for outside of a graph: LayerDrop branches on one a layer."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch 2.9 has no types for it
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        is_drawn = isinstance(made, FakeTensor) and torch.Tag.nondeterministic_seeded in func.tags
        if is_drawn and made.numel() == 1 and TracingContext.try_get() is None and not _has_tensors((args, kwargs)):
            with unset_fake_temporarily():
                drawn = func(*args, **{**(kwargs or {}), "device": "cpu"})
            set_known(made, drawn)
        return made


def _has_tensors(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(arguments))


class Fakes:
    """Creates one fake CPU tensor per tensor, so that tied tensors stay tied.

    The originals may be on any device, including the meta device.
    """

    def __init__(self) -> None:
        self.mode = _FakeMode(allow_non_fake_inputs=True)
        self._made: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []  # an id may be reused after its tensor is freed

    def model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """A copy of a module with fake parameters and buffers; a plain function is returned unchanged."""
        if not isinstance(model, nn.Module):
            return model
        memo: dict[int, Any] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            memo[id(tensor)] = self.tensor(tensor)
        try:
            return copy.deepcopy(model, memo)
        except Exception as cause:
            raise TPUModelPreparationError(
                f"{type(model).__name__} cannot be copied ({type(cause).__name__}: {cause}), but ahead-of-time "
                "compilation needs a copy. Try: make copy.deepcopy(model) work, or remove what it cannot copy."
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
                f"a tensor of shape {tuple(tensor.shape)} has layout {tensor.layout}, which XLA does not support. "
                "Allowed: dense tensors."
            )
        with self.mode, torch.no_grad():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        _copy_marks(tensor, fake)
        return fake.requires_grad_(tensor.requires_grad)


# Attributes that torch 2.9's mark_dynamic, maybe_mark_dynamic and mark_static set on a tensor.
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
