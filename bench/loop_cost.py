"""The cost of a program with one While loop over stacked tensors [N, ...].

The scheduled program of libtpu 0.0.21 has no trip count, and a fusion that reads or writes one slice of a stack has the
whole stack as an operand. `kp_dynamo.aot.cost` reads a trip count from simple counters only; here the caller knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kp_dynamo.aot.cost import ProgramCost, cost_of
from kp_dynamo.aot.hlo import Instruction, Module, Shape
from kp_dynamo.hardware import Chip


def cost_of_loop(hlo: str, num_trips: int, chip: Chip) -> ProgramCost:
    """The cost with N trips, where each access to a stack reads or writes one slice."""
    module = Module(hlo)
    for name, body in module.computations.items():
        trips = [_with_trips(i, num_trips) if i.opcode == "while" else i for i in body]
        module.computations[name] = list(_with_slices(module, trips, num_trips))
    return cost_of(module, chip)


def _with_trips(loop: Instruction, num_trips: int) -> Instruction:
    assert loop.trips is None, "the loop of this program has no trip count"
    return replace(loop, attributes=f'{loop.attributes}, "known_trip_count":{{"n":"{num_trips}"}}')


def _with_slices(module: Module, body: list[Instruction], num_trips: int) -> Iterator[Instruction]:
    """A computation whose fusions have slices in place of the stacks that they slice or update."""
    shapes = {i.name: i.shape for i in body}
    for instruction in body:
        opcodes = {i.opcode for i in module.within(instruction)}
        is_update = "dynamic-update-slice" in opcodes
        if not is_update and "dynamic-slice" not in opcodes:
            yield instruction
            continue
        operands = list(instruction.operands)
        for i, name in enumerate(operands):
            if _is_stack(shapes.get(name, Shape()), num_trips):
                operands[i] = f"{instruction.name}.{i}"
                read = Shape() if is_update else _slice(shapes[name], num_trips)  # an update writes in place
                yield Instruction(operands[i], read, "get-tuple-element", (), "")
        is_written = is_update and _is_stack(instruction.shape, num_trips)
        shape = _slice(instruction.shape, num_trips) if is_written else instruction.shape
        yield replace(instruction, operands=tuple(operands), shape=shape)


def _is_stack(shape: Shape, num_trips: int) -> bool:
    return len(shape.dims) > 1 and shape.dims[0] == num_trips


def _slice(shape: Shape, num_trips: int) -> Shape:
    return replace(shape, hbm_bytes=shape.hbm_bytes // num_trips, vmem_bytes=shape.vmem_bytes // num_trips)
