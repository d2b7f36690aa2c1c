"""Whether a sequence holds the same objects as before, at the speed of Dynamo's guards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch._C._dynamo.guards import RootGuardManager
from torch._dynamo.guards import GuardManagerType


def holds_same(values: Sequence[Any], positions: Iterable[int]) -> Callable[[Sequence[Any]], bool]:
    """A function that tells whether another list, or tuple, has these very objects at `positions`.

    It keeps none of them alive, so it is wrong once one of them has died: another object may get its id. Of all ways to
    compare ids from Python, only Dynamo's guards (torch 2.9) cost less than a call of a program can afford.
    """
    guards = RootGuardManager()
    item = guards.tuple_getitem_manager if isinstance(values, tuple) else guards.list_getitem_manager
    for position in positions:
        value, source = values[position], f"values[{position}]"
        guard = item(position, source, value, GuardManagerType.GUARD_MANAGER)
        guard.add_id_match_guard(id(value), [source])
    return guards.check
