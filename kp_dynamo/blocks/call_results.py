"""What the results of a call are like, without their values, and what decides that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TensorLike:
    """What a result is like.

    Attributes:
        shape: Its sizes, which are constants.
        stride: Its strides.
        dtype: Its dtype.
        requires_grad: Whether it has a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLike:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may stand where one like this was expected; XLA tensors have no strides of their own."""
        has_strides = tensor.device.type != "cpu" or tensor.stride() == self.stride
        is_same = (tensor.shape, tensor.dtype) == (self.shape, self.dtype)
        return is_same and has_strides and (self.requires_grad or not tensor.requires_grad)

    def fake(self, device: torch.device) -> torch.Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        if not self.requires_grad:
            return made
        with torch.enable_grad():
            return made.requires_grad_().clone()  # the result of an operator


Modes = tuple[bool, bool, torch.dtype, bool, torch.dtype]
"""Whether gradients are enabled where a child is called, and the states and dtypes of autocast for the CPU and XLA."""


def call_key(child: nn.Module, modes: Modes, args: Any, kwargs: Any) -> Any | None:
    """What decides the form of the results, but for the code; None if a number varies or nothing is a tensor."""
    tensors = tensors_in((args, kwargs))
    numbers = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.SymInt | torch.SymFloat)]
    if not tensors or numbers or any(not isinstance(n, int) for t in tensors for n in (*t.shape, *t.stride())):
        return None
    trains = modes[0] and any(p.requires_grad for p in child.parameters())
    return _described((args, kwargs)), child.training, modes, trains


def _described(value: Any) -> Any:
    """A value that can be a key; FX has classes of its own for lists and dicts."""
    if isinstance(value, (tuple, list)):
        return "tuple" if isinstance(value, tuple) else "list", tuple(map(_described, value))
    if isinstance(value, dict):
        return "dict", tuple((key, _described(item)) for key, item in value.items())
    return TensorLike.of(value) if isinstance(value, torch.Tensor) else (type(value), value)


def results_like(given: Any, result: Any) -> Any | None:
    """The results with tensors as `TensorLike`; None if a call cannot stand for them.

    A result that shares memory with an argument or another result would be one tensor under two names, a number may be
    another one in the next child, and Dynamo takes no dict from a node.
    """
    leaves = pytree.tree_leaves(result)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    inputs = tensors_in(given)
    memories = [t.untyped_storage()._cdata for t in tensors]
    is_shared = len(set(memories)) < len(memories) or any(t.untyped_storage()._cdata in memories for t in inputs)
    is_plain = all(isinstance(leaf, (torch.Tensor, type(None))) for leaf in leaves) and not _has_dict(result)
    if not tensors or is_shared or not is_plain:
        return None
    if any(t.device != inputs[0].device or not all(isinstance(n, int) for n in t.shape) for t in tensors):
        return None
    return _template(result)


def _has_dict(result: Any) -> bool:
    return isinstance(result, dict) or (isinstance(result, (tuple, list)) and any(map(_has_dict, result)))


def _template(result: Any) -> Any:
    """With Python's own list, for which FX has another."""
    if isinstance(result, (tuple, list)):
        parts = map(_template, result)
        return tuple(parts) if isinstance(result, tuple) else list(parts)
    return TensorLike.of(result) if isinstance(result, torch.Tensor) else result


def is_like(result: Any, template: Any) -> bool:
    """Whether results have the structure and the tensors of a template."""
    if isinstance(template, TensorLike):
        return isinstance(result, torch.Tensor) and template.fits(result)
    if type(result) is not type(template):
        return False
    if isinstance(template, (tuple, list)):
        return len(result) == len(template) and all(map(is_like, result, template))
    return True  # None


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def versions_of(args: Any, kwargs: Any) -> list[int]:
    """Which arguments were written to."""
    return [t._version for t in tensors_in((args, kwargs))]
