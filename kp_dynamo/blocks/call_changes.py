"""Whether the call of a child module changes Python objects or its arguments: then no node can stand for it."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.blocks.call_results import versions_of
from kp_dynamo.compat.dynamo_trace import PythonState, changes_globals, changes_objects, ids_of_changed_objects
from kp_dynamo.exceptions import XLACompilationError


class ChildrenDiffer(XLACompilationError):
    """Children that were taken to be equal return something else, or change other things."""


_DEPTH = 4
"""How deep a child is searched: a dict in a list of an object of the child."""

_NEVER_HELD = (torch.Tensor, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


class Before:
    """What a call might change, as it was when the trace began to follow it: Python objects, and its arguments."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._objects, self._versions = PythonState(), versions_of(args, kwargs)
        self._given = pytree.tree_flatten((args, kwargs))

    def has_changed(self, args: Any, kwargs: Any) -> bool:
        """Whether the call, which has these arguments afterwards, changed anything."""
        (before, form), (now, form_now) = self._given, pytree.tree_flatten((args, kwargs))
        if form != form_now or not all(map(_is_same, before, now)) or self._versions != versions_of(args, kwargs):
            return True
        return self._objects.has_changed()


def reads_changes(child: nn.Module) -> bool:
    """Whether the trace has changed what a child may read: a call of it, outside of the trace, would not see it."""
    changed = ids_of_changed_objects()
    if not changed:
        return False
    parts = (part for module in child.modules() for part in (module, *_shared_by(type(module))))
    return changes_globals() or any(_holds(part, changed, _DEPTH) for part in parts)


def _shared_by(kind: type) -> list[Any]:
    """What the modules of a class share: its attributes, and what its methods read outside of them."""
    found: list[Any] = []
    for owner in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for value in vars(owner).values() if not owner.__module__.startswith("torch.") else ():
            function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
            found += [value] if function is None else _read_outside(function)
    return found


def _read_outside(function: Any) -> list[Any]:
    """The globals and the closure of a function."""
    names, around = function.__code__.co_names, function.__globals__
    found = [around[name] for name in names if name in around]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return found


def _holds(value: Any, ids: set[int], depth: int) -> bool:
    """Whether a value is one of some objects, or has one in its attributes or items."""
    if id(value) in ids:
        return True
    if depth == 0 or isinstance(value, _NEVER_HELD):
        return False
    held = {**getattr(value, "__dict__", {})}
    held.pop("forward", None)  # a BlockForward, which has the child
    parts = [*held.values()]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        parts += value
    return any(_holds(part, ids, depth - 1) for part in parts)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, torch.Tensor) and type(one) is type(other) and bool(one == other))


def require_no_changes(name: str) -> None:
    """Check the trace of a child that is compiled by itself: the model was traced as if no child changed objects.

    Raises:
        ChildrenDiffer: It changes Python objects.
    """
    if changes_objects():
        raise ChildrenDiffer(
            f"a call of one of {name} changes Python objects, and the call that torch.compile followed did not. "
            "Allowed: equal modules, of which none changes its attributes, a list or a dict, or all do. Try: "
            "torch.compile(model, backend='kp_tpu')."
        )
