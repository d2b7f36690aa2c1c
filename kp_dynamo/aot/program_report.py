"""One compiled program as `AotReport` has it: plain frozen values, and how they are read from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kp_dynamo.hardware import CHIPS


@dataclass(frozen=True)
class Origin:
    """Where an operation of a program came from: the ATen operator, and the user's line ("" where none is known)."""

    op: str
    line: str


@dataclass(frozen=True)
class FusionReport:
    """One operation of the schedule, most often a fusion.

    Attributes:
        name: In the compiled program.
        kind: "matmul", "elementwise and reduce", "copy", "gather", "custom call" or "other".
        times: How often it runs in a step.
        cycles: The compiler's estimate of all its runs; None where it gives none.
        modelled_ms: Modelled time of all its runs.
        hbm_bytes: Bytes of the chip's memory that all its runs move.
        origins: What it is made of.
    """

    name: str
    kind: str
    times: int
    cycles: int | None
    modelled_ms: float
    hbm_bytes: int
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class CustomCallReport:
    """A program of somebody else's inside a program, which the compiler takes as it is and has no cycles for.

    Attributes:
        name: In the compiled program.
        times: How often it runs in a step.
        flops: What it declares for all its runs; None where it declares nothing, and its bytes are all that is known.
        hbm_bytes: Its operands and results in the chip's memory, each once a run.
        roofline_ms: What all its runs take at least: FLOPs at the bfloat16 peak, or bytes at the memory's speed.
        origins: What it is made of.
    """

    name: str
    times: int
    flops: int | None
    hbm_bytes: int
    roofline_ms: float
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class ProgramReport:
    """One program, as the TPU compiler made it.

    Attributes:
        name: Of the graph: "1.forward".
        runs: How often a step runs it: equal graphs have one program. All other figures here are of one run.
        compile_s: Seconds that the TPU compiler took.
        argument_bytes: Parameters and inputs; sizes are padded to the chip's tiles.
        output_bytes: Results, those that are saved for the backward among them.
        temp_bytes: Temporaries.
        alias_bytes: Results that take the memory of arguments.
        generated_code_bytes: The program itself.
        flops: Operations by the compiler's count.
        bytes: Bytes read and written in any memory, by the same.
        hbm_bytes: Of these, what the schedule moves to and from the chip's memory.
        model_flops: Operations of the products that the graph asks for.
        cycles: The compiler's cycles in all.
        estimated_ms: These by the chip's clock.
        modelled_ms: Matmul fusions by their cycles, custom calls by their rooflines, all else by its bytes; see the
            documentation of the calibration.
        unknown: Operations for which the compiler gives no cycles, which therefore count as none.
        ms_by_kind: Modelled milliseconds by kind of operation.
        dearest: The operations with the highest modelled time.
        num_copies: Copies and relayouts in the schedule.
        custom_calls: What the compiler has no cycles for, in order.
    """

    name: str
    runs: int
    compile_s: float
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int
    flops: float
    bytes: float
    hbm_bytes: int
    model_flops: int
    cycles: int
    estimated_ms: float
    modelled_ms: float
    unknown: tuple[str, ...]
    ms_by_kind: dict[str, float]
    dearest: tuple[FusionReport, ...]
    num_copies: int
    custom_calls: tuple[CustomCallReport, ...] = ()

    @property
    def custom_call_ms(self) -> float:
        """The part of `modelled_ms` that is rooflines of custom calls: at least that long, and in no cycles."""
        return sum(call.roofline_ms for call in self.custom_calls)

    @property
    def peak_bytes(self) -> int:
        """Memory of the chip that a run takes at most."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes + self.generated_code_bytes

    def flops_floor_ms(self, target: str) -> float:
        """Milliseconds that the products of the graph take at the chip's bfloat16 peak."""
        return self.model_flops / CHIPS[target].bf16_flops * 1e3

    def bytes_floor_ms(self, target: str) -> float:
        """Milliseconds that reading the arguments and writing the results once takes."""
        return (self.argument_bytes + self.output_bytes) / CHIPS[target].hbm_bytes_per_s * 1e3


def program_from_dict(content: Mapping[str, Any]) -> ProgramReport:
    """The program that `dataclasses.asdict` made plain values of.

    Raises:
        KeyError, TypeError: They are of something else.
    """
    known = {f.name: content[f.name] for f in fields(ProgramReport)}
    dearest = tuple(FusionReport(**{**fusion, "origins": _origins(fusion)}) for fusion in content["dearest"])
    calls = tuple(CustomCallReport(**{**call, "origins": _origins(call)}) for call in content["custom_calls"])
    return ProgramReport(**{**known, "unknown": tuple(known["unknown"]), "dearest": dearest, "custom_calls": calls})


def _origins(content: Mapping[str, Any]) -> tuple[Origin, ...]:
    return tuple(Origin(**origin) for origin in content["origins"])
