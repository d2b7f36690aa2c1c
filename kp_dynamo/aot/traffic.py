"""Bytes that an instruction reads and writes, where that is less than its operands and its result.

What only slices an operand reads the slice. What ends in a dynamic-update-slice writes into the buffer of the operand
that it updates, so it moves the update alone. A fusion that a collective goes through (`collectives.py`) passes the
collective's buffers on and moves none of them: they count where the collective starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from kp_dynamo.aot.hlo import Instruction, Module, Shape

_SLICES = ("dynamic-slice", "slice")
_UPDATE = "dynamic-update-slice"
_GOES_ON = '"async_collective_fusion_config"'  # an attribute of a collective inside a fusion


class Traffic:
    """What the instructions of one computation move."""

    def __init__(self, module: Module, computation: str) -> None:
        self.module = module
        self.body = module.computations.get(computation, [])
        self.by_name = {op.name: op for op in self.body}

    def moved_by(self, op: Instruction) -> tuple[int, int]:
        """Bytes that an instruction reads and writes, in HBM and in VMEM."""
        parts = [(self._shape(name), self._read(op, n)) for n, name in enumerate(op.operands)]
        parts.append((op.shape, self._written(op)))
        # The computation of a fusion does not say where its slices are: where its operands are.
        shares = [(shape, min(1.0, moved / max(shape.num_bytes, 1))) for shape, moved in parts]
        hbm = sum(round(shape.hbm_bytes * share) for shape, share in shares)
        return hbm, sum(round(shape.vmem_bytes * share) for shape, share in shares)

    def hbm_bytes_of(self, name: str) -> int:
        """Bytes of an operand in HBM."""
        return self._shape(name).hbm_bytes

    def _shape(self, name: str) -> Shape:
        return self.by_name[name].shape if name in self.by_name else Shape()

    def _read(self, op: Instruction, position: int) -> int:
        """Bytes of one of its operands."""
        if op.opcode == "fusion":
            return Traffic(self.module, op.called("calls"))._read_of_parameter(position)
        if position == 0 and op.opcode in _SLICES:
            return op.shape.num_bytes
        return 0 if position == 0 and op.opcode == _UPDATE else self._shape(op.operands[position]).num_bytes

    def _written(self, op: Instruction) -> int:
        if op.opcode == "fusion":
            inner = Traffic(self.module, op.called("calls"))
            return sum(inner._written(r) for r in inner._results if not inner._is_passed_on(r)) or op.shape.num_bytes
        return self._shape(op.operands[1]).num_bytes if op.opcode == _UPDATE else op.shape.num_bytes

    def _read_of_parameter(self, number: int) -> int:
        return sum(sum(self._readings(op)) for op in self.body if op.parameter == number)

    def _readings(self, value: Instruction) -> Iterator[int]:
        """Bytes of a value that each of its readers reads."""
        for reader in self.body:
            for position in (n for n, name in enumerate(reader.operands) if name == value.name):
                if self._is_passed_on(reader) or (reader.opcode == "tuple" and self._is_passed_on(value)):
                    continue
                if reader.opcode == "bitcast":
                    yield from self._readings(reader)
                    if reader.is_root:  # of a fusion inside a fusion, which reads it there
                        yield value.shape.num_bytes
                elif reader.opcode == _UPDATE and reader not in self._results:
                    yield value.shape.num_bytes  # it makes a value of its own, of which this is a part
                else:
                    yield self._read(reader, position)

    def _is_passed_on(self, value: Instruction) -> bool:
        """Whether a value of a fusion that a collective goes through is a buffer that it only passes on."""
        return self._has_collective and (value.opcode == "parameter" or _GOES_ON in value.attributes)

    @cached_property
    def _has_collective(self) -> bool:
        return any(_GOES_ON in op.attributes for op in self.body)

    @cached_property
    def _results(self) -> list[Instruction]:
        """What the root consists of."""
        return [part for op in self.body if op.is_root for part in self._parts(op)]

    def _parts(self, result: Instruction) -> Iterator[Instruction]:
        if result.opcode not in ("tuple", "bitcast"):
            yield result
            return
        for name in result.operands:
            yield from self._parts(self.by_name[name])
