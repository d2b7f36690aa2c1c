"""Operators on lists of tensors (`torch._foreach_mul`), as one call for each tensor.

torch_xla 2.9 runs them by ATen's loop over its own operators. So they would get none of the decompositions and forms
that make single operators right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
# Single-tensor operators whose name differs from that of the list operator.
_NAMES = {"norm": "linalg_vector_norm"}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}
_ONLY_BY_NAME = {"addcdiv": "value", "addcmul": "value"}
_PREFIX = "_foreach_"
_LIST = "List[Tensor]"


def list_decompositions() -> dict[Any, Callable[..., list[torch.Tensor]]]:
    """Of every list operator that has one for a tensor."""
    found: dict[Any, Callable[..., list[torch.Tensor]]] = {}
    for name in (name for name in dir(aten) if name.startswith(_PREFIX)):
        packet = getattr(aten, name)
        for operator in (getattr(packet, overload) for overload in packet.overloads()):
            if (single := _single(operator)) is not None:
                found[operator] = partial(_each, single, _ONLY_BY_NAME.get(name.removeprefix(_PREFIX)))
    return found


def _single(operator: Any) -> Any:
    """The operator that takes one tensor; None if ATen has no such operator."""
    name, overload = operator.overloadpacket.__name__.removeprefix(_PREFIX), operator._overloadname
    schema = operator._schema
    has_list = bool(schema.arguments) and str(schema.arguments[0].type) == _LIST
    # With a tensor of numbers, one for each of the list, ATen reads its values.
    if schema.is_mutable or not has_list or (name in _ONLY_BY_NAME and overload == "Tensor"):
        return None
    name = _NAMES.get(name, name) if overload == "List" else {**_NAMES, **_OF_NUMBERS}.get(name, name)
    return getattr(aten, name, None)


def _each(single: Any, last: str | None, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Run it tensor by tensor; `last` is the argument that it takes by name only."""
    results = []
    for number in range(len(tensors)):
        own = [_at(arg, number) for arg in (tensors, *args)]
        named = {key: _at(arg, number) for key, arg in kwargs.items() if arg is not None}
        if last is not None and len(own) == 4:
            named[last] = own.pop()
        results.append(single(*own, **named))
    return results


def _at(argument: Any, number: int) -> Any:
    return argument[number] if isinstance(argument, (list, tuple)) else argument
