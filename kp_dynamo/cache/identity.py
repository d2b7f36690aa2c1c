"""The identity of a callable, independent of its name: rerunning a notebook cell may rebind a name.

An object's identity is a number, assigned at its first use and never reused, unlike an `id`. The identity of a function
adds its code and what the code reads: cells, defaults, and the globals that it names. Values are compared by content,
so a modified list has another identity.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import sys
import types
import weakref
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

_PLAIN = (
    int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.layout, torch.device,
    torch.memory_format,
)  # fmt: skip
_MAX_PARTS = 2000
"""Limit for one pass: computing the identity of one that reads more values takes too long."""
# A library does not change while it is loaded: its functions and classes stay the same objects.
_LIBRARIES = sys.stdlib_module_names | {"torch", "torch_xla", "kp_dynamo", "numpy", "einops"}


class Uncacheable(Exception):
    """Something has no stable text or identity, so a compilation that uses it is not shared."""


class _Numbers:
    """Assigns a number to each object, for as long as the object lives."""

    def __init__(self) -> None:
        self._next = itertools.count(1)
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def of(self, value: Any) -> int:
        address = id(value)
        known = self._known.get(address)
        if known is not None and known[0]() is value:
            return known[1]
        try:
            reference = weakref.ref(value, lambda gone: self._forget(address, gone))
        except TypeError:
            raise Uncacheable(f"an object of type {type(value).__name__}, which has no weak references") from None
        number = next(self._next)
        self._known[address] = (reference, number)
        return number

    def _forget(self, address: int, gone: weakref.ref[Any]) -> None:
        # Another object may have reused the address by now.
        if (known := self._known.get(address)) is not None and known[0] is gone:
            del self._known[address]


_numbers = _Numbers()


def number_of(value: Any) -> int:
    """The number of an object, which is unique in this process and never reused.

    Raises:
        Uncacheable: Its type has no weak references.
    """
    return _numbers.of(value)


def is_of_library(value: Any) -> bool:
    """Whether a function or a class belongs to a library that a session does not redefine."""
    module = getattr(value, "__module__", None)
    if module is None:  # torch.sin is a static method of a class in C++
        module = getattr(getattr(value, "__self__", None), "__module__", None)
    return str(module).partition(".")[0] in _LIBRARIES


def identity_of(value: Any) -> object:
    """The identity of an object and of everything it reads, as a hashable value.

    Raises:
        Uncacheable: It reads something without an identity, such as a tensor, or too much.
    """
    return _Reading().identity(value)


class _Reading:
    """One traversal of an object; an object seen before is represented by its number only."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}
        self.num_parts = 0

    def identity(self, value: Any) -> object:
        self.num_parts += 1
        if self.num_parts > _MAX_PARTS:
            raise Uncacheable(f"{type(value).__name__}: it reads more than {_MAX_PARTS} values")
        if isinstance(value, enum.Enum):
            return type(value).__qualname__, value.name, self.identity(value.value)
        if type(value) in (*_PLAIN, bool):
            return type(value).__name__, repr(value)
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, *map(self.identity, value))
        if isinstance(value, (set, frozenset)):
            return (type(value).__name__, *sorted(map(repr, map(self.identity, value))))
        if isinstance(value, Mapping):
            return (type(value).__name__, *((self.identity(k), self.identity(v)) for k, v in value.items()))
        return self._of_object(value)

    def _of_object(self, value: Any) -> object:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, logging.Logger):  # its handlers do not affect what is computed
            return "logger", value.name
        if isinstance(value, types.MethodType):
            return "method", self.identity(value.__func__), self.identity(value.__self__)
        if isinstance(value, (types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return "builtin", str(value)
        number = number_of(value)
        if isinstance(value, (type, types.FunctionType)) and is_of_library(value):
            return number
        if number in self.seen:
            return "again", self.seen[number]
        self.seen[number] = len(self.seen)
        return self._contents(value) if _is_value(value) else (number, self._contents(value))

    def _contents(self, value: Any) -> object:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return tuple((name, self._member(member)) for c in value.__mro__ for name, member in self._own(c))
        if isinstance(value, torch.Tensor):
            raise Uncacheable("it reads a tensor")
        if isinstance(value, functools.partial):
            return self.identity((value.func, value.args, value.keywords))
        held = {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}
        return self.identity(type(value)), self.identity({**held, **getattr(value, "__dict__", {})})

    def _own(self, owner: type) -> list[tuple[str, Any]]:
        if is_of_library(owner):
            return []
        return [(name, member) for name, member in vars(owner).items() if name not in _OF_EVERY_CLASS]

    def _member(self, member: Any) -> object:
        if isinstance(member, (staticmethod, classmethod)):
            return self.identity(member.__func__)
        if isinstance(member, property):
            return tuple(self.identity(f) for f in (member.fget, member.fset) if f is not None)
        if isinstance(member, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            return member.__name__  # a slot: its values are among the object's
        return self.identity(member)

    def _function(self, function: types.FunctionType) -> object:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        names = dict.fromkeys(_names(function.__code__))
        read = {name: function.__globals__[name] for name in names if name in function.__globals__}
        defaults = (function.__defaults__, function.__kwdefaults__)
        return number_of(function.__code__), self.identity(cells), self.identity(read), self.identity(defaults)


# Members that Python, dataclasses and typing add: they do not affect what is computed.
_OF_EVERY_CLASS = (
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__match_args__", "__dataclass_fields__",
    "__dataclass_params__", "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__", "_is_protocol",
    "__protocol_attrs__", "__non_callable_proto_members__", "__firstlineno__", "__static_attributes__",
)  # fmt: skip


def _is_value(value: Any) -> bool:
    """Whether an object is defined by its contents alone: a frozen dataclass."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen) and not isinstance(value, type)


def _names(code: types.CodeType) -> list[str]:
    """The globals that code and its inner functions may read; the list includes attribute names."""
    inside = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return [*code.co_names, *inside]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # empty cells raise
    except ValueError:
        return False
    return True
