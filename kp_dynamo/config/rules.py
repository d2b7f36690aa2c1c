"""What an option may be: small rules that accept a value, in its normal form, or raise ValueError.

A rule says in words what it allows, for the message a user reads; `config/options.py` adds the name of the key.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


@dataclasses.dataclass(frozen=True)
class Rule:
    """One option's allowed values, in words and as a check.

    Attributes:
        allowed: What is allowed, as the user reads it after "allowed: ".
        normalise: Returns the value as it is stored; raises ValueError, with or without a reason.
    """

    allowed: str
    normalise: Callable[[object], object]

    def __or__(self, other: Rule) -> Rule:
        """Either of two rules; the first that accepts decides the stored form."""

        def first_that_accepts(value: object) -> object:
            try:
                return self.normalise(value)
            except ValueError:
                return other.normalise(value)

        return Rule(f"{self.allowed}, {other.allowed}", first_that_accepts)


def short(value: object) -> str:
    """A `repr` that is never long and never raises."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write ints of more than 4300 digits
        return f"a huge {type(value).__name__}"


def one_of(*choices: str) -> Rule:
    """One of some words."""
    return _checked(", ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices)


def nothing() -> Rule:
    """None and no other value."""
    return _checked("None", lambda value: value is None)


def boolean() -> Rule:
    """True or False; 0 and 1 are more often a slip than a wish."""
    return _checked("True, False", lambda value: isinstance(value, bool))


def integer(minimum: int, maximum: float = math.inf) -> Rule:
    """A whole number from `minimum` to `maximum`."""
    bounds = f"an int >= {minimum}" + f" and <= {maximum:g}" * math.isfinite(maximum)
    return _checked(bounds, lambda value: _is_integer(value, minimum) and value <= maximum)  # type: ignore[operator]


def number(above: float = -math.inf, minimum: float = -math.inf, maximum: float = math.inf) -> Rule:
    """A finite int or float inside its bounds, stored as a float."""
    bounds = [f"> {above:g}"] * math.isfinite(above) + [f">= {minimum:g}"] * math.isfinite(minimum)
    bounds += [f"<= {maximum:g}"] * math.isfinite(maximum)

    def normalise(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        try:
            as_float = float(value)
        except OverflowError:
            raise ValueError("it is too large for a float") from None
        if not (math.isfinite(as_float) and above < as_float and minimum <= as_float <= maximum):
            raise ValueError
        return as_float

    return Rule("a number " + " and ".join(bounds), normalise)


def names(of: str) -> Rule:
    """A list of non-empty strings, stored as a tuple; `of` says what they name."""

    def normalise(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            raise ValueError(f"write [{short(value)}], a list with one name")
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
            raise ValueError
        return tuple(value)

    return Rule(f"a list of {of}", normalise)


def folder() -> Rule:
    """A path as str or PathLike, stored as a Path; whether it can be written is seen when it is."""

    def normalise(value: object) -> Path:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError
        return Path(text)

    return Rule("a path", normalise)


def graph_passes() -> Rule:
    """A list of `GraphPass` objects, stored as a tuple.

    Told by their shape, not their class: options must not import passes, and a pass of the user's
    needs no base class of ours.
    """

    def normalise(value: object) -> tuple[object, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError
        for candidate in value:
            if reason := _why_no_pass(candidate):
                raise ValueError(f"{short(candidate)} {reason}")
        return tuple(value)

    return Rule("a list of GraphPass objects (frozen dataclass instances with a `name` and a `__call__`)", normalise)


def buckets() -> Rule:
    """A rising list of lengths, stored as a tuple, or an evenly spaced range of them, stored as a dict."""

    def is_list(value: object) -> bool:
        lengths = value if isinstance(value, list | tuple) else ()
        rising = all(_is_integer(length, 1) for length in lengths) and list(lengths) == sorted(set(lengths))
        return bool(lengths) and rising

    def is_range(value: object) -> bool:
        if not isinstance(value, Mapping) or set(value) != {"min", "max", "step"}:
            return False
        return all(_is_integer(length, 1) for length in value.values()) and value["min"] <= value["max"]

    def normalise(value: object) -> object:
        if is_list(value):
            return tuple(value)  # type: ignore[arg-type]  # is_list has seen that it is a list or tuple
        if is_range(value):
            return dict(value)  # type: ignore[call-overload]  # is_range has seen that it is a mapping
        raise ValueError

    return Rule('a rising list of ints >= 1 such as [64, 128], {"min": 64, "max": 512, "step": 64}', normalise)


def _checked(allowed: str, accepts: Callable[[object], bool]) -> Rule:
    """A rule that stores a value as it was given."""

    def normalise(value: object) -> object:
        if not accepts(value):
            raise ValueError
        return value

    return Rule(allowed, normalise)


def _is_integer(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _why_no_pass(candidate: object) -> str | None:
    """Why an object cannot serve as a GraphPass; None where it can."""
    parameters = getattr(candidate, "__dataclass_params__", None)
    if isinstance(candidate, type):
        return "is a class; give an instance of it"
    if not callable(candidate):
        return "is not callable"
    if not getattr(parameters, "frozen", False):
        return "is not a frozen dataclass; its fields are its identity in the compile cache"
    if not isinstance(getattr(candidate, "name", None), str):
        return "has no `name` string"
    if _ADDRESS.search(repr(candidate)):
        return "has a memory address in its repr, which is its identity in the compile cache"
    return None
