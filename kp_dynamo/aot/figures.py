"""The figures of a report: what was measured of each program, and what follows from it for a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.hardware import CHIPS

DISCLAIMER = (
    "All times are estimates of the TPU compiler, or modelled on them: no chip ran this program, and none was timed."
)


@dataclass(frozen=True)
class AotFigures:
    """What a TPU generation makes of a model, as frozen values; its properties are derived from them.

    Attributes:
        target: The generation.
        backend: "kp_tpu", or "openxla" for torch_xla's own.
        options: As the user gave them.
        train: Whether backward programs are among them.
        matmul_precision: Of float32 products.
        programs: In the order in which they were compiled.
        memory_budget_bytes: What a program may use: the share of the chip's memory that the options allow.
        seconds: By stage: "dynamo", "aot", "passes", "trace" (of this process), "tpu" (the sum over the programs,
            while this process goes on tracing) and "total" (from the call to the report).
        peak_host_mib: Most memory that this process has held so far.
        passes: Lines of what each pass did.
        graph_breaks: Lines of where Dynamo ended a graph, and why.
        fallbacks: Lines of what would run on the CPU in between; its time is in no figure.
        num_tokens: Elements of the first argument where it holds integers, else 0.
        versions: Of torch, torch_xla, libtpu, jax and this package.
    """

    target: str
    backend: str
    options: dict[str, Any]
    train: bool
    matmul_precision: str
    programs: tuple[ProgramReport, ...]
    memory_budget_bytes: float
    seconds: dict[str, float]
    peak_host_mib: float
    passes: tuple[str, ...]
    graph_breaks: tuple[str, ...]
    fallbacks: tuple[str, ...]
    num_tokens: int
    versions: dict[str, str]

    @property
    def cycles(self) -> int:
        """Of a step: all programs, as often as they run."""
        return sum(p.runs * p.cycles for p in self.programs)

    @property
    def estimated_ms(self) -> float:
        """Milliseconds of a step by the compiler's cycles."""
        return sum(p.runs * p.estimated_ms for p in self.programs)

    @property
    def modelled_ms(self) -> float:
        """Milliseconds of a step, modelled."""
        return sum(p.runs * p.modelled_ms for p in self.programs)

    @property
    def custom_call_ms(self) -> float:
        """Milliseconds of these that are rooflines of custom calls, of which the cycles have nothing."""
        return sum(p.runs * p.custom_call_ms for p in self.programs)

    @property
    def flops(self) -> float:
        """Operations of a step by the compiler's count."""
        return sum(p.runs * p.flops for p in self.programs)

    @property
    def bytes(self) -> float:
        """Bytes of a step by the compiler's count."""
        return sum(p.runs * p.bytes for p in self.programs)

    @property
    def model_flops(self) -> int:
        """Operations that the graphs ask for."""
        return sum(p.runs * p.model_flops for p in self.programs)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operations without an estimate, by program."""
        return tuple(f"{p.name} {name}" for p in self.programs for name in p.unknown)

    @property
    def peak_bytes(self) -> int:
        """Memory of the program that takes most."""
        return max((p.peak_bytes for p in self.programs), default=0)

    @property
    def fits(self) -> bool:
        """Whether every program stays within the budget of memory."""
        return self.peak_bytes <= self.memory_budget_bytes

    @property
    def tpu_compile_s(self) -> float:
        """Seconds of the TPU compiler."""
        return sum(p.compile_s for p in self.programs)

    @property
    def flops_floor_ms(self) -> float:
        """Milliseconds below which the products alone cannot go."""
        return sum(p.runs * p.flops_floor_ms(self.target) for p in self.programs)

    @property
    def bytes_floor_ms(self) -> float:
        """Milliseconds below which arguments and results cannot be moved."""
        return sum(p.runs * p.bytes_floor_ms(self.target) for p in self.programs)

    @property
    def over_floor(self) -> float:
        """Modelled time over the higher of the two floors of each program."""
        floors = ((p, p.flops_floor_ms(self.target), p.bytes_floor_ms(self.target)) for p in self.programs)
        floor = sum(p.runs * max(by_flops, by_bytes) for p, by_flops, by_bytes in floors)
        return self.modelled_ms / floor if floor else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: operations that the graphs ask for, over the peak in the modelled time."""
        return self.flops_floor_ms / self.modelled_ms if self.modelled_ms else 0.0

    @property
    def usd_per_million_steps(self) -> float:
        """At the chip's hourly price and the modelled time."""
        return CHIPS[self.target].usd_per_hour * self.modelled_ms * 1e6 / 3.6e6

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The same by token; None where the first argument holds no integers."""
        return self.usd_per_million_steps / self.num_tokens if self.num_tokens else None

    def totals(self) -> dict[str, Any]:
        """The figures of a step, by name."""
        names = (
            "cycles", "estimated_ms", "modelled_ms", "custom_call_ms", "flops", "bytes", "model_flops", "peak_bytes",
            "fits", "tpu_compile_s", "flops_floor_ms", "bytes_floor_ms", "over_floor", "mfu", "usd_per_million_steps",
            "usd_per_million_tokens",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "unknown": len(self.unknown)}
