"""Base of the configuration classes: each field has a rule, which is checked on every assignment."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import Any, Self

from kp_dynamo.config import rules
from kp_dynamo.exceptions import TPUConfigurationError


def checked_field(default: Any, rule: rules.Rule) -> Any:
    """A dataclass field that `rule` checks at construction and on every assignment."""
    return dataclasses.field(default=default, metadata={"rule": rule})


def member_of(choices: type[enum.Enum]) -> rules.Rule:
    """A member of an enum, or its value, stored as the member."""

    def normalise(value: object) -> object:
        if not isinstance(value, str | choices):
            raise ValueError
        return choices(value)

    words = ", ".join(repr(member.value) for member in choices)
    return rules.Rule(f"a {choices.__name__} or its value: {words}", normalise)


def xla_flags() -> rules.Rule:
    """A string or list of `--flag` or `--flag=value`, stored as one string."""

    def normalise(value: object) -> str:
        flags = value.split() if isinstance(value, str) else value
        if not isinstance(flags, list | tuple) or not flags:
            raise ValueError
        if wrong := [flag for flag in flags if not (isinstance(flag, str) and flag.startswith("--"))]:
            raise ValueError(f"{rules.short(wrong[0])} does not start with --")
        return " ".join(flags)

    return rules.Rule("flags such as '--xla_tpu_scoped_vmem_limit_kib=65536'", normalise)


def known_keys(what: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raise if a key is unknown.

    Raises:
        TPUConfigurationError: The message names the key, the closest match and all known keys.
    """
    names = list(known)
    for key in given:
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
            raise TPUConfigurationError(f"{what} has no {rules.short(key)}{hint} Allowed: {', '.join(names)}.")


def required_mapping(what: str, value: object) -> Mapping[str, Any]:
    """`value`, if it is a mapping."""
    if not isinstance(value, Mapping):
        raise TPUConfigurationError(
            f"{what}={rules.short(value)} ({type(value).__name__}) is invalid. Allowed: a dict that to_dict() returned."
        )
    return value


class Checked:
    """Base of a dataclass whose fields come from `checked_field`: invalid or unknown values are never stored."""

    def __new__(cls, **given: object) -> Self:
        """Check the keys before the generated `__init__`, which would raise TypeError for an unknown one."""
        known_keys(cls.__name__, given, _rules_of(cls))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        by_name = _rules_of(type(self))
        known_keys(type(self).__name__, [name], by_name)
        try:
            normal = by_name[name].normalise(value)
        except ValueError as reason:
            because = f": {reason}" if str(reason) and "is not a valid" not in str(reason) else ""
            raise TPUConfigurationError(
                f"{type(self).__name__}.{name}={rules.short(value)} is invalid{because}. "
                f"Allowed: {by_name[name].allowed}."
            ) from None
        super().__setattr__(name, normal)

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        values = {name: getattr(self, name) for name in _rules_of(type(self))}
        return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """The inverse of `to_dict`. Missing keys, as in older files, get their defaults.

        Raises:
            TPUConfigurationError: An unknown key or a bad value.
        """
        given = required_mapping(cls.__name__, values)
        known_keys(cls.__name__, given, _rules_of(cls))
        return cls(**given)


def _rules_of(cls: type) -> dict[str, rules.Rule]:
    fields: dict[str, dataclasses.Field[Any]] = getattr(cls, "__dataclass_fields__", {})
    return {name: field.metadata["rule"] for name, field in fields.items()}
