"""What a report is of: the class of the model, and its tensors as its signature names them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.explanation.text_layout import first_of

_MAX_SHOWN = 4


@dataclass(frozen=True)
class Subject:
    """What a report is of.

    Attributes:
        model: The name of its class, or of a function; "" in a report of an earlier version.
        inputs: Each tensor of the call: "input_ids: int64[8, 512]".
    """

    model: str = ""
    inputs: tuple[str, ...] = ()

    @classmethod
    def of_call(cls, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Subject:
        """The subject of a report of `model(*args, **kwargs)`; the model is not a compiled one."""
        is_module = isinstance(model, nn.Module)
        name = type(model).__name__ if is_module else getattr(model, "__name__", type(model).__name__)
        return cls(str(name), tuple(_tensors(_named(model.forward if is_module else model, args, kwargs))))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Subject:
        """The inverse of `dataclasses.asdict`.

        Raises:
            KeyError, TypeError: The content is not a Subject.
        """
        return cls(**{**content, "inputs": tuple(content["inputs"])})

    def facts(self, date: str) -> tuple[str, ...]:
        """The model, its inputs and the date, for the head of a page; what is unknown is left out."""
        return tuple(filter(None, (self.model, ", ".join(first_of(self.inputs, _MAX_SHOWN)), date)))


def sides_of(sides: tuple[str, str], date: str) -> tuple[str, ...]:
    """What two compared reports are of, and the date, for the head of a page."""
    named = (f"{when}: {side}" for when, side in zip(("before", "after"), sides, strict=True) if side)
    return (*named, *filter(None, (date,)))


def _named(called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names of the signature, or by their numbers if it has none."""
    try:
        return dict(inspect.signature(called).bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a built-in function
        return {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}


def _tensors(named: Mapping[str, Any]) -> Iterator[str]:
    for name, value in named.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            if isinstance(leaf, torch.Tensor):
                kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
                yield f"{name}{pytree.keystr(path)}: {kind}"
