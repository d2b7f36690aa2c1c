"""Reads the outputs of a graph from what its program returned, at every call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from kp_dynamo.lowering.program_inputs import Slot

Read = Callable[[Sequence[Any], list[Any]], list[Any]]


def reader(outputs: Sequence[Slot]) -> Read:
    """A function of the arguments of a call and of the roots, which a program returned, that returns the outputs."""
    kinds = {slot.kind for slot in outputs}
    if kinds == {"root"} and [slot.value for slot in outputs] == list(range(len(outputs))):
        count = len(outputs)
        return lambda args, roots: roots if len(roots) == count else roots[:count]
    if "root" not in kinds or not kinds <= {"root", "argument"}:
        return lambda args, roots: [_output(slot, args, roots) for slot in outputs]
    return _of_roots_and_arguments(outputs)


def _of_roots_and_arguments(outputs: Sequence[Slot]) -> Read:
    # Five times as fast as a list comprehension. The first root is taken once more, because for one position it
    # returns no tuple.
    count = 1 + max(slot.value for slot in outputs if slot.kind == "root")
    take = operator.itemgetter(0, *(slot.value + count * (slot.kind == "argument") for slot in outputs))

    def read(args: Sequence[Any], roots: list[Any]) -> list[Any]:
        found = [*take((*roots[:count], *args))]
        del found[0]
        return found

    return read


def _output(slot: Slot, args: Sequence[Any], roots: list[Any]) -> Any:
    if slot.kind == "root":
        return roots[slot.value]
    if slot.kind == "argument":
        return args[slot.value]
    if slot.kind == "copy":
        return args[slot.value].clone()
    if slot.kind == "root copy":
        return roots[slot.value].clone()
    # A caller may write to the result; the constant itself must not change.
    return slot.value.clone() if slot.kind == "constant" else slot.value
