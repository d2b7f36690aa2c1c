"""Encodes trees of tensors and plain values (an optimizer's state) as JSON and named tensors.

JSON has no tuples, no non-string keys and no infinities: each is written as an object with one key that starts with
"$". No other types are accepted, so reading never runs code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from kp_dynamo.exceptions import TPUCheckpointError


class Encoder:
    """Converts values to JSON values; tensors are collected under the path where they first occur."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def encode(self, value: object, path: str) -> Any:
        """`value` for `json.dumps`; an unsupported type, or a second tensor of one path, raises TPUCheckpointError."""
        match value:
            case torch.Tensor():
                name = self._names.setdefault(id(value), path)
                if self.tensors.setdefault(name, value) is not value:
                    why = f"two tensors would have the name {name!r}. Try: rename a key that contains a dot."
                    raise TPUCheckpointError(why)
                return {"$tensor": name}
            case float() if not math.isfinite(value):
                return {"$float": repr(float(value))}
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                members = [self.encode(held, f"{path}.{i}") for i, held in enumerate(value)]
                return {"$tuple": members} if isinstance(value, tuple) else members
            case dict():
                items = [[self.encode(key, path), self.encode(held, f"{path}.{key}")] for key, held in value.items()]
                is_plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in items)
                return dict(items) if is_plain else {"$dict": items}
        raise TPUCheckpointError(
            f"{path} is a {type(value).__qualname__}, which a checkpoint cannot hold. Allowed: tensors, numbers, "
            "strings, None, and lists, tuples and dicts of them."
        )


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of `Encoder.encode`; another value raises KeyError, TypeError or ValueError."""
    if isinstance(value, list):
        return [decode(member, tensors) for member in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(member, tensors) for key, member in value.items()}
    ((_, content),) = value.items()
    match tag:
        case "$tensor":
            return tensors[content]
        case "$float":
            return float(content)
        case "$tuple":
            return tuple(decode(member, tensors) for member in content)
        case "$dict":
            return {decode(key, tensors): decode(member, tensors) for key, member in content}
    raise ValueError(f"{tag!r} is not a known tag")
