"""What the configuration classes share: fields with a rule each, checked whenever they are set."""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Iterable, Mapping
from typing import Any, Self

from kp_dynamo.config import rules
from kp_dynamo.exceptions import TPUConfigurationError


def checked_field(default: Any, rule: rules.Rule) -> Any:
    """A dataclass field that is checked by `rule` at construction and at every assignment."""
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
    """Raise on a key that is not known.

    Raises:
        TPUConfigurationError: Names it, the nearest known one, and all of them.
    """
    names = list(known)
    for key in given:
        if key not in names:
            nearest = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {nearest[0]!r}? " if nearest else ""
            raise TPUConfigurationError(f"{what} has no {rules.short(key)}; {hint}known: {', '.join(names)}")


def required_mapping(what: str, value: object) -> Mapping[str, Any]:
    """`value`, if it is a mapping."""
    if not isinstance(value, Mapping):
        raise TPUConfigurationError(
            f"{what} is {rules.short(value)} ({type(value).__name__}); allowed: a dict, as to_dict() gives it"
        )
    return value


class Checked:
    """Base of a dataclass whose fields come from `checked_field`: nothing wrong or unknown is ever stored."""

    def __new__(cls, **given: object) -> Self:
        """Sees the keys before the generated `__init__` does, which would call an unknown one a TypeError."""
        known_keys(cls.__name__, given, _rules_of(cls))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        by_name = _rules_of(type(self))
        known_keys(type(self).__name__, [name], by_name)
        try:
            normal = by_name[name].normalise(value)
        except ValueError as reason:
            because = f" ({reason})" if str(reason) and "is not a valid" not in str(reason) else ""
            raise TPUConfigurationError(
                f"{type(self).__name__}.{name} is {rules.short(value)}{because}; allowed: {by_name[name].allowed}"
            ) from None
        super().__setattr__(name, normal)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        values = {name: getattr(self, name) for name in _rules_of(type(self))}
        return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """The opposite of `to_dict`. What is left out, as older files do, has its default.

        Raises:
            TPUConfigurationError: An unknown key or a bad value.
        """
        given = required_mapping(cls.__name__, values)
        known_keys(cls.__name__, given, _rules_of(cls))
        return cls(**given)


def _rules_of(cls: type) -> dict[str, rules.Rule]:
    fields: dict[str, dataclasses.Field[Any]] = getattr(cls, "__dataclass_fields__", {})
    return {name: field.metadata["rule"] for name, field in fields.items()}
