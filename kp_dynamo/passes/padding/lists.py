"""Operators on lists of tensors (`torch._foreach_mul`), taken apart into those on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
# Where the operator on one tensor is not called as the one on lists is.
_NAMES = {"norm": "linalg_vector_norm"}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
_ONLY_BY_NAME = {"addcdiv": "value", "addcmul": "value"}
_PREFIX = "_foreach_"


def apart(target: Any) -> Callable[..., list[torch.Tensor]] | None:
    """What does the same as an operator on lists, tensor by tensor; None for any other operator."""
    name = target.overloadpacket.__name__
    if not name.startswith(_PREFIX) or target._schema.is_mutable:
        return None
    packet = getattr(aten, _one_tensor(name.removeprefix(_PREFIX), target._overloadname), None)
    if packet is None:
        return None
    last = _ONLY_BY_NAME.get(name.removeprefix(_PREFIX))

    def each(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        results = []
        for number in range(len(tensors)):
            own = [_at(arg, number) for arg in (tensors, *args)]
            named = {key: _at(arg, number) for key, arg in kwargs.items() if arg is not None}
            if last is not None and len(own) == 4:
                named[last] = own.pop()
            results.append(packet(*own, **named))
        return results

    return each


def _one_tensor(name: str, overload: str) -> str:
    return _NAMES.get(name, name) if overload == "List" else {**_NAMES, **_OF_NUMBERS}.get(name, name)


def _at(argument: Any, number: int) -> Any:
    return argument[number] if isinstance(argument, (list, tuple)) else argument
