"""How often a loop of a scheduled program runs.

The TPU's compiler notes the trip count of some loops. For others it is read from the loop itself: a counter that starts
at a constant, grows by a constant, and ends the loop at a constant.
"""

from __future__ import annotations

from typing import NamedTuple

from kp_dynamo.aot.hlo import Instruction, Module

_COPIES = {"copy", "bitcast", "copy-done", "copy-start"}


class _Bound(NamedTuple):
    """The condition `values[position] < limit`."""

    position: int
    limit: int


def trips_of(module: Module, computation: str, loop: Instruction) -> int | None:
    """The trip count of a loop in a computation, or None if it is not known before the program runs."""
    if loop.trips is not None:
        return loop.trips
    bound = _bound(module, loop.called("condition"))
    if bound is None:
        return None
    start = _start(module, computation, loop, bound.position)
    step = _step(module, loop.called("body"), bound.position)
    if start is None or step is None or step < 1:
        return None
    return max(0, -(-(bound.limit - start) // step))


def _bound(module: Module, condition: str) -> _Bound | None:
    body = _by_name(module, condition)
    root = next((i for i in body.values() if i.is_root), None)
    if root is None or root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    counter, limit = (body[name] for name in root.operands)
    if counter.opcode != "get-tuple-element" or limit.constant is None:
        return None
    return _Bound(int(counter.attribute("index")), limit.constant)


def _start(module: Module, computation: str, loop: Instruction, position: int) -> int | None:
    around = _by_name(module, computation)
    values = around[loop.operands[0]]
    if values.opcode != "tuple":
        return None
    return _original(around, values.operands[position]).constant


def _step(module: Module, body_name: str, position: int) -> int | None:
    """What a step adds to a value, if it adds a constant."""
    body = _by_name(module, body_name)
    root = next((i for i in body.values() if i.is_root), None)
    if root is None or root.opcode != "tuple":
        return None
    added = _original(body, root.operands[position])
    if added.opcode != "add":
        return None
    parts = [_original(body, name) for name in added.operands]
    constants = [part.constant for part in parts if part.constant is not None]
    counters = [
        part for part in parts if part.opcode == "get-tuple-element" and part.attribute("index") == str(position)
    ]
    return constants[0] if len(constants) == len(counters) == 1 else None


def _original(body: dict[str, Instruction], name: str) -> Instruction:
    """The instruction whose result a value is, perhaps through copies: libtpu 0.0.51 copies counters."""
    while body[name].opcode in _COPIES:
        name = body[name].operands[0]
    return body[name]


def _by_name(module: Module, computation: str) -> dict[str, Instruction]:
    return {instruction.name: instruction for instruction in module.computations.get(computation, ())}
