"""Which inputs make a capture miss: the same code was compiled before, with inputs of other sizes or dtypes.

`key_diff` compares keys part by part, which is complete and hard to read. This says what a user can change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from kp_dynamo.cache.call_parts import InputPart
from kp_dynamo.cache.compile_key import CompileKey

_OP = re.compile(r"^.*? = ([^\s(]+)\(")
_TOLD = ("dtype", "requires_grad", "device", "layout", "type")


def input_changes(key: CompileKey, cached: Iterable[CompileKey], names: Sequence[str]) -> tuple[str, ...]:
    """The inputs that differ from the nearest cached compilation of the same operators, in words.

    Args:
        key: The key of a capture that missed.
        cached: The keys of the cached captures.
        names: The name of each input in the user's code.

    Returns:
        Lines such as "batch['input_ids'] is [8, 513], was [8, 512]"; () if no cached capture has the same operators, or
        none of their inputs differ.
    """
    found = [tuple(_changes(key, other, names)) for other in cached if _operators(other) == _operators(key)]
    return min([changes for changes in found if changes], key=len, default=())


def _operators(key: CompileKey) -> list[str]:
    """The operators of a key's graph, without their arguments and shapes."""
    lines = str(dict(key.parts).get("graph", "")).splitlines()
    return [found[1] for line in lines if (found := _OP.match(line))]


def _inputs(key: CompileKey) -> tuple[object, ...]:
    found = dict(key.parts).get("inputs", ())
    return found if isinstance(found, tuple) else ()


def _changes(key: CompileKey, other: CompileKey, names: Sequence[str]) -> Iterator[str]:
    now, was = _inputs(key), _inputs(other)
    if len(now) != len(was):
        return
    named = [*names, *(f"input {i}" for i in range(len(names), len(now)))]
    for name, new, old in zip(named, now, was, strict=False):
        if isinstance(new, InputPart) and isinstance(old, InputPart):
            yield from _between(name, new, old)
        elif new != old:
            yield f"{name} is {_plain(new)}, was {_plain(old)}"


def _between(name: str, new: InputPart, old: InputPart) -> Iterator[str]:
    if new.shape != old.shape:
        yield f"{name} is {list(new.shape)}, was {list(old.shape)}"
    elif new.stride != old.stride:
        yield f"{name} has strides {list(new.stride)}, had {list(old.stride)}"
    for field in _TOLD:
        now, was = getattr(new, field), getattr(old, field)
        if now != was:
            yield f"{name}: {field} is {now}, was {was}"


def _plain(value: object) -> str:
    return str(value[-1]) if isinstance(value, tuple) and value else str(value)
