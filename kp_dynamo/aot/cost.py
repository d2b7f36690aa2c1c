"""Cost of a scheduled program per operation, by the two estimates that `calibration` describes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kp_dynamo.aot.calibration import GATHER_S_PER_ROW, VMEM_BYTES_PER_S
from kp_dynamo.aot.collectives import first_of_chain, is_communication, is_end, offloaded
from kp_dynamo.aot.hlo import Instruction, Module
from kp_dynamo.aot.loops import trips_of
from kp_dynamo.aot.traffic import Traffic
from kp_dynamo.hardware import Chip

Kind = Literal["matmul", "gather", "copy", "elementwise and reduce", "custom call", "collective", "other"]

# Instructions that take no time on the chip.
_NO_WORK = {"parameter", "get-tuple-element", "bitcast", "tuple", "constant", "after-all", "iota", "partition-id"}
_NO_WORK_TARGETS = {
    "ConcatBitcast", "X64SplitLow", "X64SplitHigh", "X64Combine", "Sharding", "AllocateBuffer",
    "AssumeGatherIndicesInBound",
}  # fmt: skip
# Asynchronous copies overlap with other work: they count only towards the traffic of the whole program.
_ASYNC = re.compile(r"(copy|slice|async|dynamic-slice|dynamic-update-slice)-(start|done|update)")
_HAS_ESTIMATE = ("fusion", "custom-call", "convolution", "dot", "conditional")
_COPYING_OPCODES = ("copy", "transpose", "reshape", "bitcast-convert", "slice", "concatenate", "pad", "broadcast")


@dataclass(frozen=True)
class OpCost:
    """One instruction of the schedule.

    Attributes:
        name: Its name in the HLO.
        kind: The kind of work.
        times: How often it runs: the product of the trip counts of the enclosing loops.
        cycles: The compiler's estimate of one run; None if it gives none.
        seconds: The modelled time of one run.
        hbm_bytes: Bytes that one run moves to and from HBM.
        op_names: Names of its operations in the traced program.
        flops: FLOPs that a custom call declares for one run; None if it declares none, and for other instructions.
    """

    name: str
    kind: Kind
    times: int
    cycles: int | None
    seconds: float
    hbm_bytes: int
    op_names: tuple[str, ...]
    flops: int | None = None

    @property
    def is_opaque(self) -> bool:
        """Whether it is a custom call without a cycle estimate: its seconds are a roofline."""
        return self.kind == "custom call" and self.cycles is None

    @property
    def total_seconds(self) -> float:
        return self.seconds * self.times


@dataclass(frozen=True)
class ProgramCost:
    """A scheduled program.

    Attributes:
        ops: Its instructions, in order; asynchronous copies have no time of their own. Neither have collectives, whose
            time is on the links (`timeline.py`), except in a fusion with a matmul.
        unknown: Names of operations without a cycle estimate, and of loops whose trip count is unknown.
        cycles: Total of the compiler's cycles, with loop bodies times their trip counts.
        hbm_bytes: Total bytes moved to and from HBM.
        modelled_s: Matmul fusions by their cycles, custom calls by their rooflines, the rest by its bytes; at least
            the time of the total traffic.
    """

    ops: tuple[OpCost, ...]
    unknown: tuple[str, ...]
    cycles: int
    hbm_bytes: int
    modelled_s: float


def cost_of(module: Module, chip: Chip) -> ProgramCost:
    """The cost of a program on one chip of a generation."""
    walk = _Walk(module, chip)
    ops = tuple(walk.through(module.entry, 1))
    hbm_bytes = sum(op.hbm_bytes * op.times for op in ops)
    seconds = sum(op.total_seconds for op in ops)
    return ProgramCost(
        ops=ops,
        unknown=tuple(walk.unknown),
        cycles=sum((op.cycles or 0) * op.times for op in ops),
        hbm_bytes=hbm_bytes,
        modelled_s=max(seconds, hbm_bytes / chip.hbm_bytes_per_s),
    )


class _Walk:
    """Walks a computation and the computations that it calls."""

    def __init__(self, module: Module, chip: Chip) -> None:
        self.module, self.chip = module, chip
        self.unknown: list[str] = []

    def through(self, computation: str, times: int) -> Iterator[OpCost]:
        traffic = Traffic(self.module, computation)
        for instruction in traffic.body:
            if instruction.opcode == "while":
                yield from self._loop(computation, instruction, times)
            elif instruction.opcode == "call":
                yield from self.through(instruction.called("to_apply"), times)
            elif not _is_free(instruction):
                yield self._op(instruction, traffic, times)

    def _loop(self, computation: str, loop: Instruction, times: int) -> Iterator[OpCost]:
        trips = trips_of(self.module, computation, loop)
        if trips is None:
            self.unknown.append(loop.name)
        yield from self.through(loop.called("body"), times * (1 if trips is None else trips))

    def _op(self, op: Instruction, traffic: Traffic, times: int) -> OpCost:
        if (inner := self._offloaded(op, traffic)) is not None:
            moved = op.shape.hbm_bytes + inner if op.opcode == "async-done" else 0
            return OpCost(op.name, "collective", times, None, 0.0, moved, self._op_names(op))
        if _ASYNC.fullmatch(op.opcode):
            moved = max(op.shape.hbm_bytes, op.shape.vmem_bytes) if op.opcode.endswith("-done") else 0
            return OpCost(op.name, "copy", times, None, 0.0, moved, self._op_names(op))
        kind = self._kind(op)
        if kind == "collective":
            moved = 0 if is_end(self.module, op) else op.shape.hbm_bytes + sum(map(traffic.hbm_bytes_of, op.operands))
            return OpCost(op.name, kind, times, op.cycles, 0.0, moved, self._op_names(op))
        if op.cycles is None and op.opcode in _HAS_ESTIMATE:
            self.unknown.append(op.name)
        hbm, vmem = traffic.moved_by(op)
        if kind == "gather":
            hbm = 2 * op.shape.num_bytes
        seconds = self._seconds(op, kind, hbm, vmem)
        return OpCost(op.name, kind, times, op.cycles, seconds, hbm, self._op_names(op), op.declared_flops)

    def _offloaded(self, op: Instruction, traffic: Traffic) -> int | None:
        """Bytes that a collective of the SparseCores reads; None for any other instruction."""
        found = offloaded(self.module, first_of_chain(op, traffic.body)) if op.opcode.startswith("async-") else None
        if found is None:
            return None
        inner, body = found
        shapes = {i.name: i.shape for i in body}
        return sum(shapes[name].hbm_bytes for name in inner.operands if name in shapes)

    def _seconds(self, op: Instruction, kind: Kind, hbm: int, vmem: int) -> float:
        by_hbm = hbm / self.chip.hbm_bytes_per_s
        if kind == "matmul" and op.cycles is not None:
            return max(op.cycles / self.chip.clock_hz, by_hbm)
        if kind == "gather":
            rows = 1
            for size in op.shape.dims[:-1]:
                rows *= size
            return max(rows * GATHER_S_PER_ROW, by_hbm)
        # A custom call has no cycles; its roofline is its FLOPs at the peak, or its operands and results moved once.
        by_work = (op.declared_flops or 0) / self.chip.bf16_flops if kind == "custom call" else 0.0
        return max(by_work, by_hbm, vmem / VMEM_BYTES_PER_S)

    def _kind(self, op: Instruction) -> Kind:
        if self.module.has_matmul(op) or op.opcode in ("convolution", "dot"):
            # Cycle estimates are known to be accurate only for matmuls inside a fusion.
            return "matmul" if op.called("calls") else "other"
        if is_communication(self.module, op):
            return "collective"
        if op.opcode == "fusion" and op.attribute("kind") == "kCustom":
            return "gather"
        if op.opcode == "custom-call":
            return "custom call"
        inner = {i.opcode for i in self.module.within(op)} - _NO_WORK
        if op.opcode in _COPYING_OPCODES or (op.opcode == "fusion" and inner <= {*_COPYING_OPCODES, "fusion"}):
            return "copy"
        return "elementwise and reduce" if op.opcode in ("fusion", "reduce") else "other"

    def _op_names(self, op: Instruction) -> tuple[str, ...]:
        names = [op.op_name, *(inner.op_name for inner in self.module.within(op))]
        return tuple(dict.fromkeys(name for name in names if name))


def _is_free(op: Instruction) -> bool:
    if op.opcode == "custom-call":
        return op.attribute("custom_call_target") in _NO_WORK_TARGETS
    return op.opcode in _NO_WORK
