"""The report of one compiled program: plain frozen values, and reading them from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kp_dynamo.aot.peak_bytes import peak_bytes
from kp_dynamo.aot.slice_report import CollectiveReport
from kp_dynamo.hardware import DEVICES


@dataclass(frozen=True)
class Origin:
    """The origin of an operation: the ATen operator, the user's line and the module ("" if unknown)."""

    op: str
    line: str
    module: str = ""


@dataclass(frozen=True)
class FusionReport:
    """One operation of the schedule, usually a fusion.

    Attributes:
        name: Name in the compiled program.
        kind: "matmul", "elementwise and reduce", "copy", "gather", "custom call" or "other".
        times: How often it runs in a run of the program.
        cycles: The compiler's estimate of all its runs; None if it gives none.
        modelled_ms: Modelled time of all its runs.
        hbm_bytes: Bytes that all its runs move to and from HBM.
        origins: The operations it was compiled from.
        num_alike: How many operations of equal layers it stands for; the figures are those of all of them.
    """

    name: str
    kind: str
    times: int
    cycles: int | None
    modelled_ms: float
    hbm_bytes: int
    origins: tuple[Origin, ...]
    num_alike: int = 1

    @property
    def title(self) -> str:
        """ "fusion.12", or "fusion.12 x 32 alike"."""
        return f"{self.name} x {self.num_alike} alike" if self.num_alike > 1 else self.name


@dataclass(frozen=True)
class CustomCallReport:
    """A custom call, such as a Pallas kernel, for which the compiler has no cycle estimate.

    Attributes:
        name: Name in the compiled program.
        times: How often it runs in a run of the program.
        flops: FLOPs that it declares, for all its runs; None if it declares none, so only its bytes are known.
        hbm_bytes: Bytes of its operands and results in HBM, each once per run.
        roofline_ms: Lower bound of all its runs: FLOPs at the bfloat16 peak, or bytes at HBM bandwidth.
        origins: The operations it was compiled from.
    """

    name: str
    times: int
    flops: int | None
    hbm_bytes: int
    roofline_ms: float
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class ModuleTime:
    """What the operators of one module take in one run of a program, without those of its children.

    Attributes:
        path: Its path in the model, such as "layers.0.attn", and "" for the model itself.
        kind: Its class; path and class are "" for operators that belong to no module.
        modelled_ms: Modelled time.
        flops_floor_ms: Its matmuls at the chip's bfloat16 peak.
        hbm_floor_ms: Its bytes to and from HBM at the bandwidth.
    """

    path: str
    kind: str
    modelled_ms: float
    flops_floor_ms: float
    hbm_floor_ms: float


@dataclass(frozen=True)
class ProgramReport:
    """One program compiled by the TPU compiler. Sizes are padded to the chip's tiles; figures are those of one device.

    Attributes:
        name: Name of the graph, such as "1.forward".
        runs: How often a step runs it; equal graphs share one program. All other figures are for one run.
        compile_s: CPU seconds of its compile.
        argument_bytes: Size of parameters and inputs.
        output_bytes: Size of the results, including those saved for the backward.
        temp_bytes: Size of the temporaries.
        alias_bytes: Size of the results that reuse donated arguments.
        generated_code_bytes: Size of the program itself.
        flops: FLOPs, as the compiler counts them.
        bytes: Bytes read and written in any memory, as the compiler counts them.
        hbm_bytes: Bytes that the schedule moves to and from HBM.
        model_flops: FLOPs of the graph's matmuls; on several chips, the share of one.
        recomputed_flops: The part of them in which a backward computes the forward again.
        cycles: Total of the compiler's cycles.
        estimated_ms: `cycles` at the chip's clock.
        modelled_ms: Matmul fusions by their cycles, custom calls by their rooflines, everything else by its bytes; see
            the calibration.
        unknown: Operations without a cycle estimate, which count as 0 cycles, and loops without a trip count.
        ms_by_kind: Modelled milliseconds by kind of operation.
        dearest: The operations with the highest modelled time.
        num_copies: Copies and relayouts in the schedule.
        custom_calls: Custom calls without a cycle estimate, in order.
        held_bytes: The most that the step holds beside the program's arguments while it runs; 0 if unknown.
        modules: For a piece of a divided graph, the modules that the runs compute, one for each layer; () for a whole
            graph.
        layers: The number of equal layers in a run of such a piece.
        collectives: Its communication on several chips, by kind and axis of the mesh.
        by_module: Its time by the module of the model; () in a report of an earlier version.
        live_bytes: The most of arguments, results and temporaries that is live at once, by the compiler; 0 in a report
            of an earlier version.
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
    held_bytes: int = 0
    modules: tuple[str, ...] = ()
    collectives: tuple[CollectiveReport, ...] = ()
    by_module: tuple[ModuleTime, ...] = ()
    recomputed_flops: int = 0
    layers: int = 1
    live_bytes: int = 0

    @property
    def is_block(self) -> bool:
        """Whether it is the program of a repeated layer, or of several."""
        return len(self.modules) > self.layers

    @property
    def custom_call_ms(self) -> float:
        """The part of `modelled_ms` that is rooflines of custom calls, a lower bound that `cycles` does not include."""
        return sum(call.roofline_ms for call in self.custom_calls)

    @property
    def exposed_ms(self) -> float:
        """The time that a chip waits for its links; `modelled_ms` does not include it."""
        return sum(row.exposed_ms for row in self.collectives)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a run."""
        return peak_bytes(self)

    def flops_floor_ms(self, target: str) -> float:
        """Milliseconds that the graph's matmuls take at the chip's bfloat16 peak."""
        return self.model_flops / DEVICES[target].bf16_flops * 1e3

    def bytes_floor_ms(self, target: str) -> float:
        """Milliseconds to read the arguments and write the results once."""
        return (self.argument_bytes + self.output_bytes) / DEVICES[target].hbm_bytes_per_s * 1e3


def program_from_dict(content: Mapping[str, Any]) -> ProgramReport:
    """The inverse of `dataclasses.asdict` for a ProgramReport.

    Raises:
        KeyError, TypeError: The content is not a ProgramReport.
    """
    # Earlier reports lack them.
    added = ("held_bytes", "modules", "collectives", "by_module", "recomputed_flops", "layers", "live_bytes")
    known = {f.name: content[f.name] for f in fields(ProgramReport) if f.name in content or f.name not in added}
    known["modules"] = tuple(content.get("modules", ()))
    known["collectives"] = tuple(CollectiveReport(**row) for row in content.get("collectives", ()))
    known["by_module"] = tuple(ModuleTime(**row) for row in content.get("by_module", ()))
    dearest = tuple(FusionReport(**{**fusion, "origins": _origins(fusion)}) for fusion in content["dearest"])
    calls = tuple(CustomCallReport(**{**call, "origins": _origins(call)}) for call in content["custom_calls"])
    return ProgramReport(**{**known, "unknown": tuple(known["unknown"]), "dearest": dearest, "custom_calls": calls})


def _origins(content: Mapping[str, Any]) -> tuple[Origin, ...]:
    return tuple(Origin(**origin) for origin in content["origins"])
