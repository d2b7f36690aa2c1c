"""Validation rules for options: each normalizes a value or raises ValueError.

A rule also describes the allowed values for the error message; `config/options.py` adds the name of the option.
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
    """The allowed values of one option: a description and a check.

    Attributes:
        allowed: The description that follows "Allowed: " in an error message.
        normalise: Returns the value in its stored form; raises ValueError, with or without a reason.
    """

    allowed: str
    normalise: Callable[[object], object]

    def __or__(self, other: Rule) -> Rule:
        """A rule that accepts what either rule accepts; the first one that does decides the stored form."""

        def first_that_accepts(value: object) -> object:
            try:
                return self.normalise(value)
            except ValueError:
                return other.normalise(value)

        return Rule(f"{self.allowed}, {other.allowed}", first_that_accepts)


def short(value: object) -> str:
    """A truncated `repr` that never raises."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write ints of more than 4300 digits
        return f"a huge {type(value).__name__}"


def one_of(*choices: str) -> Rule:
    """One of these strings."""
    return _checked(", ".join(map(repr, choices)), lambda value: isinstance(value, str) and value in choices)


def nothing() -> Rule:
    """Only None."""
    return _checked("None", lambda value: value is None)


def boolean() -> Rule:
    """True or False; 0 and 1 are rejected because they are usually mistakes."""
    return _checked("True, False", lambda value: isinstance(value, bool))


def integer(minimum: int, maximum: float = math.inf) -> Rule:
    """A whole number from `minimum` to `maximum`."""
    bounds = f"an int >= {minimum}" + f" and <= {maximum:g}" * math.isfinite(maximum)
    return _checked(bounds, lambda value: _is_integer(value, minimum) and value <= maximum)  # type: ignore[operator]


def number(above: float = -math.inf, minimum: float = -math.inf, maximum: float = math.inf) -> Rule:
    """A finite int or float within the bounds, stored as a float."""
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
    """A list of non-empty strings, stored as a tuple; `of` describes them."""

    def normalise(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            raise ValueError(f"write [{short(value)}], a list with one name")
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
            raise ValueError
        return tuple(value)

    return Rule(f"a list of {of}", normalise)


def folder() -> Rule:
    """A str or PathLike, stored as a Path; the rule does not check that it is writable."""

    def normalise(value: object) -> Path:
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError
        return Path(text)

    return Rule("a path", normalise)


def graph_passes() -> Rule:
    """A list of `GraphPass` objects, stored as a tuple.

    The check is structural: options must not import passes, and a user's pass needs no base class from this package.
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
    """A strictly increasing list of lengths, stored as a tuple, or an evenly spaced range, stored as a dict."""

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
            return tuple(value)  # type: ignore[arg-type]  # is_list checked that it is a list or tuple
        if is_range(value):
            return dict(value)  # type: ignore[call-overload]  # is_range checked that it is a mapping
        raise ValueError

    return Rule('an increasing list of ints >= 1 such as [64, 128], {"min": 64, "max": 512, "step": 64}', normalise)


def _checked(allowed: str, accepts: Callable[[object], bool]) -> Rule:
    """A rule that stores the value unchanged."""

    def normalise(value: object) -> object:
        if not accepts(value):
            raise ValueError
        return value

    return Rule(allowed, normalise)


def _is_integer(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _why_no_pass(candidate: object) -> str | None:
    """Why an object is not a valid GraphPass; None if it is one."""
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
