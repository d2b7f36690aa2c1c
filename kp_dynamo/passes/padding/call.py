"""A call of an operator on padded tensors: what a rule is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kp_dynamo.passes.padding.atoms import Padded, Size
from kp_dynamo.passes.padding.masks import Masks


@dataclass(frozen=True)
class Like:
    """What a tensor is in the graph: its dtype, and its shape in padded sizes that may be used while tracing."""

    value: torch.Tensor
    masks: Masks

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def shape(self) -> list[Size]:
        return [self.masks.tracked(size) for size in self.value.shape]


@dataclass(frozen=True)
class Call:
    """A call to be made right: tensors among the arguments are `Padded`, sizes are padded ones.

    Attributes:
        like: What the call's value is in the graph: `Like` in the place of each tensor.
        seen: The tensors among the arguments as autograd has seen them, in the order of `operands()`.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    masks: Masks
    like: Any
    seen: tuple[torch.Tensor, ...] = ()

    def arg(self, position: int, default: Any = None) -> Any:
        """A positional argument, or what the operator takes where it is left out."""
        return self.args[position] if len(self.args) > position else default

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The operator itself, on tensors."""
        return self.target(*unwrapped(args), **unwrapped(kwargs))

    def unchanged(self) -> Any:
        """The call as it stands."""
        return self.run(*self.args, **self.kwargs)

    def operands(self) -> list[Padded]:
        """All tensors among the arguments."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs), is_leaf=is_padded_value) if is_padded_value(x)]

    def with_operands(self, operands: Sequence[Padded]) -> Call:
        """The call on other tensors, in the order of `operands()`."""
        given = iter(operands)
        args, kwargs = pytree.tree_map(
            lambda x: next(given) if is_padded_value(x) else x, (self.args, self.kwargs), is_leaf=is_padded_value
        )
        return replace(self, args=args, kwargs=kwargs)

    def own(self, name: str, position: int, default: Any = None) -> Any:
        """An argument that may be given by name."""
        return self.kwargs[name] if name in self.kwargs else self.arg(position, default)


def is_padded_value(value: object) -> bool:
    return isinstance(value, Padded)


def unwrapped(tree: Any) -> Any:
    """The tensors themselves."""
    return pytree.tree_map(lambda x: x.tensor if isinstance(x, Padded) else x, tree, is_leaf=is_padded_value)
