"""A call of an operator on padded tensors: the argument of a rule."""

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
    """A tensor as the graph has it: its dtype, and its shape in padded sizes that the tracer can use."""

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
    """A call to make correct at padded sizes: tensor arguments are `Padded`, and sizes are padded sizes.

    Attributes:
        like: The call's value in the graph, with a `Like` in place of each tensor.
        seen: The tensor arguments as autograd saw them, in the order of `operands()`.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    masks: Masks
    like: Any
    seen: tuple[torch.Tensor, ...] = ()

    def arg(self, position: int, default: Any = None) -> Any:
        """A positional argument, or `default` if it is omitted."""
        return self.args[position] if len(self.args) > position else default

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator itself, on plain tensors."""
        return self.target(*unwrapped(args), **unwrapped(kwargs))

    def unchanged(self) -> Any:
        """Run the call without changes."""
        return self.run(*self.args, **self.kwargs)

    def operands(self) -> list[Padded]:
        """All tensors among the arguments."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs), is_leaf=is_padded_value) if is_padded_value(x)]

    def with_operands(self, operands: Sequence[Padded]) -> Call:
        """The call with its tensors replaced, in the order of `operands()`."""
        given = iter(operands)
        args, kwargs = pytree.tree_map(
            lambda x: next(given) if is_padded_value(x) else x, (self.args, self.kwargs), is_leaf=is_padded_value
        )
        return replace(self, args=args, kwargs=kwargs)

    def named_arg(self, name: str, position: int, default: Any = None) -> Any:
        """An argument that may be passed by keyword."""
        return self.kwargs[name] if name in self.kwargs else self.arg(position, default)


def is_padded_value(value: object) -> bool:
    return isinstance(value, Padded)


def unwrapped(tree: Any) -> Any:
    """`tree` with each `Padded` replaced by its tensor."""
    return pytree.tree_map(lambda x: x.tensor if isinstance(x, Padded) else x, tree, is_leaf=is_padded_value)
