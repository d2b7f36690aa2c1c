"""The figures of a step, derived from those of its programs (`program_report.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kp_dynamo.aot.blocks import Block, blocks_of
from kp_dynamo.aot.live_values import LiveValues
from kp_dynamo.aot.memory_line import MemoryPoint, ProgramCall, memory_line
from kp_dynamo.aot.program_report import ProgramReport
from kp_dynamo.aot.slice_report import CollectiveReport, SliceReport, added_up
from kp_dynamo.explanation.graph_reports import FallbackReport, PassOnGraph
from kp_dynamo.explanation.subject import Subject
from kp_dynamo.hardware import CHIPS, DEVICES

DISCLAIMER = "All times are estimates of the TPU compiler, or modelled on them: no chip ran this program or was timed."


@dataclass(frozen=True)
class AotFigures:
    """The figures of a model compiled for a TPU generation, as frozen values; its properties are derived from them.

    On several chips, times, memory and work are those of one chip; tokens and prices are those of all. On v7, they are
    those of one device, which is half a chip.

    Attributes:
        target: The generation.
        backend: "kp_tpu", or "openxla" for torch_xla's own.
        options: The options that the user set.
        train: Whether backward programs are included.
        matmul_precision: Precision of float32 matmuls.
        programs: The programs, in compilation order.
        memory_budget_bytes: Memory that a program may use, according to the options.
        seconds: By stage: "dynamo", "aot", "passes", "trace" (of this process), "tpu" (CPU seconds of all programs,
            which compile in other processes meanwhile) and "total" (from the call to the report).
        peak_host_mib: Peak memory of this process so far.
        passes: One line per pass and graph: what it did.
        graph_breaks: One line per graph break: its place and reason.
        fallbacks: One line per operator that would fall back to the CPU; their time is in no figure.
        num_tokens: Elements of the first argument if it is an integer tensor, else 0.
        versions: Versions of torch, torch_xla, libtpu, jax and this package.
        pass_reports: What each pass did to each graph; () in a report of an earlier version, which has only `passes`.
        fallback_reports: The same for `fallbacks`.
        calls: The runs of programs in a step, in order; () if they are unknown, as with `backend="openxla"`.
        slice: The chips; None for one.
        live_at_peak: What lives at the peak of the step, counted from the graphs; () if `calls` are unknown.
        subject: The model and its inputs.
        libtpu_flags: The compiler's flags, in LIBTPU_INIT_ARGS; other flags make other programs.
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
    pass_reports: tuple[PassOnGraph, ...] = ()
    fallback_reports: tuple[FallbackReport, ...] = ()
    calls: tuple[ProgramCall, ...] = ()
    slice: SliceReport | None = None
    live_at_peak: tuple[LiveValues, ...] = ()
    subject: Subject = Subject()
    libtpu_flags: str = ""

    @property
    def num_chips(self) -> int:
        """Chips that a step runs on; a step on half a v7 has one, too."""
        return 1 if self.slice is None else self.slice.num_chips

    @property
    def num_devices(self) -> int:
        """Devices that a step runs on: chips, and on v7 the two halves of each."""
        return 1 if self.slice is None else self.slice.num_chips * CHIPS[self.target].num_devices

    @property
    def usd_per_hour(self) -> float:
        """Price of an hour of what a step runs on; for half a v7, half the price of a chip."""
        return DEVICES[self.target].usd_per_hour * self.num_devices

    @property
    def collectives(self) -> tuple[CollectiveReport, ...]:
        """The communication of a step, by kind and axis of the mesh."""
        return added_up((p.runs, p.collectives) for p in self.programs)

    @property
    def exposed_ms(self) -> float:
        """Milliseconds of a step in which a chip waits for its links."""
        return sum(p.runs * p.exposed_ms for p in self.programs)

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step: the modelled time, and on several chips the exposed communication."""
        return self.modelled_ms + self.exposed_ms

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second, of all chips together; None if the first argument is not an integer tensor."""
        return self.num_tokens / self.step_ms * 1e3 if self.num_tokens and self.step_ms else None

    @property
    def cycles(self) -> int:
        """Cycles of a step: all programs, times their runs."""
        return sum(p.runs * p.cycles for p in self.programs)

    @property
    def estimated_ms(self) -> float:
        """Milliseconds of a step by the compiler's cycles."""
        return sum(p.runs * p.estimated_ms for p in self.programs)

    @property
    def modelled_ms(self) -> float:
        """Milliseconds of a step, modelled, without communication."""
        return sum(p.runs * p.modelled_ms for p in self.programs)

    @property
    def custom_call_ms(self) -> float:
        """The part of `modelled_ms` that is rooflines of custom calls, which the cycles do not include."""
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
        """FLOPs of the graphs' matmuls, recomputed ones too."""
        return sum(p.runs * p.model_flops for p in self.programs)

    @property
    def recomputed_flops(self) -> int:
        """The part of `model_flops` in which a backward computes the forward again."""
        return sum(p.runs * p.recomputed_flops for p in self.programs)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Operations without a cycle estimate, with their program."""
        return tuple(f"{p.name} {name}" for p in self.programs for name in p.unknown)

    @property
    def peak_bytes(self) -> int:
        """Memory of the largest program."""
        return max((p.peak_bytes for p in self.programs), default=0)

    @property
    def step_peak_bytes(self) -> int:
        """Peak memory of the step: a program, and what the step holds beside its arguments meanwhile.

        It is the memory of forward and backward. The state of an optimizer, which only `plan` knows of, is not in it.
        """
        return max((p.held_bytes + p.peak_bytes for p in self.programs), default=0)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The repeated layers, with the figures of all their runs."""
        return blocks_of(self.programs)

    @property
    def memory_line(self) -> list[MemoryPoint]:
        """The memory at each run of a step, in order: what is live when the program starts, and its peak."""
        return memory_line(self.programs, self.calls)

    @property
    def fits(self) -> bool:
        """Whether the step fits the memory budget, without the state of an optimizer."""
        return self.step_peak_bytes <= self.memory_budget_bytes

    @property
    def tpu_compile_s(self) -> float:
        """CPU seconds of the TPU compiler, over all programs."""
        return sum(p.compile_s for p in self.programs)

    @property
    def flops_floor_ms(self) -> float:
        """Lower bound of a step in milliseconds: the matmuls at peak FLOP/s."""
        return sum(p.runs * p.flops_floor_ms(self.target) for p in self.programs)

    @property
    def bytes_floor_ms(self) -> float:
        """Lower bound of a step in milliseconds: moving arguments and results once."""
        return sum(p.runs * p.bytes_floor_ms(self.target) for p in self.programs)

    @property
    def over_floor(self) -> float:
        """Time of a step over the higher of each program's two lower bounds."""
        floors = ((p, p.flops_floor_ms(self.target), p.bytes_floor_ms(self.target)) for p in self.programs)
        floor = sum(p.runs * max(by_flops, by_bytes) for p, by_flops, by_bytes in floors)
        return self.step_ms / floor if floor else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOP utilization: FLOPs of the model's matmuls, each once, over the peak in the time of a step.

        Attention counts in full, also if it is causal, as in `torch.utils.flop_counter`. Recomputed matmuls do not
        count; in `hfu` they do.
        """
        return self.hfu * (1 - self.recomputed_flops / self.model_flops) if self.model_flops else self.hfu

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilization: as `mfu`, with the matmuls that a backward recomputes."""
        return self.flops_floor_ms / self.step_ms if self.step_ms else 0.0

    @property
    def usd_per_million_steps(self) -> float:
        """Price of a million steps at the hourly price of the chips and the time of a step."""
        return self.usd_per_hour * self.step_ms * 1e6 / 3.6e6

    @property
    def usd_per_million_tokens(self) -> float | None:
        """The same per token; None if the first argument is not an integer tensor."""
        return self.usd_per_million_steps / self.num_tokens if self.num_tokens else None

    def totals(self) -> dict[str, Any]:
        """The figures of a step, by name."""
        names = (
            "cycles", "estimated_ms", "modelled_ms", "custom_call_ms", "flops", "bytes", "model_flops", "peak_bytes",
            "step_peak_bytes", "fits", "tpu_compile_s", "flops_floor_ms", "bytes_floor_ms", "over_floor", "mfu",
            "hfu", "recomputed_flops", "usd_per_million_steps", "usd_per_million_tokens", "num_chips", "exposed_ms",
            "step_ms", "tokens_per_s",
        )  # fmt: skip
        return {**{name: getattr(self, name) for name in names}, "unknown": len(self.unknown)}
