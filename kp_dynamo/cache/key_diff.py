"""Why a key missed: the nearest cached one and what differs.

The parts of a key come in the order in which differences are reported. Three kinds are compared in detail:

* a NamedTuple, such as an input's (dtype, shape, stride, ...): field by field;
* any other tuple, such as all inputs: element by element;
* a text of one `name: type = op(arguments)` line per node, such as the graph: line by line.

Any other value is compared by `==` and shown as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple, cast

from kp_dynamo.cache.compile_key import CompileKey

_NODE = re.compile(r"^.*? = (?P<op>[^\s(]+)\(")
_MAX_SHOWN = 4
_MAX_TEXT = 80
_MAX_SAME = 24  # characters that two clipped texts show of their common prefix


class _Difference(NamedTuple):
    """One difference as text, and how many dims, fields or lines it stands for."""

    text: str
    weight: int = 1


def explain_miss(key: CompileKey, cached_keys: Iterable[CompileKey]) -> str:
    """Describe the difference between `key` and the nearest of `cached_keys` in one line, "cached -> new".

    Compares whole graph texts: meant for debug logs and `explain`, not for hot paths.
    """
    candidates = [list(_differences(key, cached)) for cached in cached_keys]
    if not candidates:
        return "the cache is empty"
    nearest = min(candidates, key=lambda differences: sum(d.weight for d in differences))
    if not nearest:
        return "an equal entry is cached"
    shown = "; ".join(difference.text for difference in nearest[:_MAX_SHOWN])
    num_more = len(nearest) - _MAX_SHOWN
    return f"{shown}; and {num_more} more" if num_more > 0 else shown


def _differences(new: CompileKey, old: CompileKey) -> Iterator[_Difference]:
    new_parts, old_parts = dict(new.parts), dict(old.parts)
    for name in {**new_parts, **old_parts}:
        if name in old_parts and name in new_parts:
            yield from _between(name, old_parts[name], new_parts[name])
        else:
            yield _Difference(f"{name}: only in the {'new' if name in new_parts else 'cached'} key")


def _between(where: str, old: object, new: object) -> Iterator[_Difference]:
    """The differences between two values of one part; none if they are equal."""
    if old == new and type(old) is type(new):
        return
    if isinstance(old, tuple) and isinstance(new, tuple) and type(old) is type(new):
        yield from _between_records(where, old, new) if hasattr(old, "_fields") else _between_tuples(where, old, new)
    elif isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
        yield _between_texts(where, old.splitlines(), new.splitlines())
    else:
        yield _Difference(f"{where}: {_against(str(old), str(new))}")


def _between_records(where: str, old: tuple[object, ...], new: tuple[object, ...]) -> Iterator[_Difference]:
    names = cast(tuple[str, ...], old._fields)  # type: ignore[attr-defined]  # the caller saw a NamedTuple
    differing = {name: (was, now) for name, was, now in zip(names, old, new, strict=True) if was != now}
    if "shape" in differing:
        differing.pop("stride", None)  # a different shape implies a different stride
    for name, (was, now) in differing.items():
        if name == "shape" and isinstance(was, tuple) and isinstance(now, tuple):
            yield from _between_shapes(where, was, now)
        else:
            yield _Difference(f"{where}, {name}: {_against(str(was), str(now))}")


def _between_shapes(where: str, old: tuple[object, ...], new: tuple[object, ...]) -> Iterator[_Difference]:
    if len(old) != len(new):
        yield _Difference(f"{where}, rank: {len(old)} -> {len(new)}, shape {list(old)} -> {list(new)}")
        return
    for dim, (was, now) in enumerate(zip(old, new, strict=True)):
        if was != now:
            yield _Difference(f"{where}, dim {dim}: {was} -> {now}")


def _between_tuples(where: str, old: tuple[object, ...], new: tuple[object, ...]) -> Iterator[_Difference]:
    one = where.removesuffix("s")  # "inputs" holds "input 0", "input 1"
    if len(old) != len(new):
        yield _Difference(f"number of {where}: {len(old)} -> {len(new)}", abs(len(old) - len(new)))
    for place, (was, now) in enumerate(zip(old, new, strict=False)):
        yield from _between(f"{one} {place}", was, now)


def _between_texts(where: str, old: list[str], new: list[str]) -> _Difference:
    """The first line with another op, else the first that differs, and how many lines differ."""
    pairs = enumerate(zip_longest(old, new, fillvalue=""))
    other = [(node, was, now) for node, (was, now) in pairs if was != now]
    if not other:
        return _Difference(f"{where}: line ends differ")
    node, was, now = next((o for o in other if _op(o[1]) != _op(o[2])), other[0])
    what = f"{_op(was)} -> {_op(now)}" if _op(was) != _op(now) else _against(was, now)
    count = f" ({len(other)} of {max(len(old), len(new))} lines differ)" if len(other) > 1 else ""
    return _Difference(f"{where}: node {node} {what}{count}", len(other))


def _op(line: str) -> str:
    """The op of a node's line, or the clipped line if it is not a call."""
    match = _NODE.match(line)
    return match["op"] if match else _clipped(line.strip()) or "nothing"


def _against(old: str, new: str) -> str:
    """Two texts, clipped so that their first difference is visible."""
    num_same = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    start = max(0, num_same - _MAX_SAME)
    start = start if max(len(old), len(new)) > _MAX_TEXT else 0
    dots = "..." if start else ""
    return f"{dots}{_clipped(old[start:])} -> {dots}{_clipped(new[start:])}"


def _clipped(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
