"""Change a class of another library, and put back exactly what was there."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class ReplacedAttributes:
    """The attributes of classes that were replaced or added, with what they were before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, object]] = []

    def put(self, owner: Any, name: str, value: object) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def restore(self) -> None:
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
