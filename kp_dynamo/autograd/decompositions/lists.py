"""Decomposes operators on lists of tensors (`torch._foreach_mul`) into one call per tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
# Single-tensor operators whose name differs from that of the list operator.
_NAMES = {"norm": "linalg_vector_norm"}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
_ONLY_BY_NAME = {"addcdiv": "value", "addcmul": "value"}
_PREFIX = "_foreach_"


def decomposed_by_tensor(target: Any) -> Callable[..., list[torch.Tensor]] | None:
    """A function that runs a list operator tensor by tensor; None for any other operator."""
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
