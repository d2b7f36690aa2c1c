"""Add a member to an enum of strings that another library has closed, and take it out again."""

from __future__ import annotations

from typing import Any


def add_member(enum: Any, name: str) -> None:
    """What the line `NAME = "NAME"` in the body of the enum would have done."""
    member = str.__new__(enum, name)
    member._name_ = member._value_ = name
    member.__objclass__ = enum
    member._sort_order_ = len(enum._member_names_)
    setattr(enum, name, member)  # before it is a member, because an enum refuses to assign to its members
    enum._member_names_.append(name)
    enum._member_map_[name] = enum._value2member_map_[name] = member


def remove_member(enum: Any, name: str) -> None:
    """Undo `add_member`."""
    enum._member_names_.remove(name)
    del enum._member_map_[name], enum._value2member_map_[name]
    delattr(enum, name)
