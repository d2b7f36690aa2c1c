"""What `explain` found."""

from __future__ import annotations

from dataclasses import dataclass, field

from kp_dynamo.explanation.disk_report import DiskReport
from kp_dynamo.explanation.graph_reports import (
    CaptureReport,
    DivisionReport,
    FallbackReport,
    GraphBreak,
    GraphReport,
    PassOnGraph,
    UncompiledFrame,
    WholeTensor,
)
from kp_dynamo.explanation.subject import Subject


@dataclass(frozen=True)
class ExplanationFigures:
    """The reports of one run of a model, as frozen values.

    Attributes:
        graph_breaks: Dynamo's graph breaks and their reasons.
        captures: Dynamo's graphs, and the pieces of those that were divided at repeated layers.
        divisions: Which graphs were divided, and why the others were not.
        passes: What each pass did to each graph.
        graphs: The graphs that were lowered.
        fallbacks: Operators that ran on the CPU.
        seconds: Time by stage: "dynamo", "aot" (AOTAutograd, partition and keys), "passes", "trace", "xla".
        uncompiled: Functions that Dynamo gave up, which ran eagerly.
        whole: Tensors above 64 MiB that every device holds whole, although the model is divided among several.
        disk: What the disk cache did; None if it is not enabled.
        versions: Versions of torch, torch_xla, libtpu and this package.
        subject: The model and its inputs.
    """

    graph_breaks: tuple[GraphBreak, ...]
    captures: tuple[CaptureReport, ...]
    divisions: tuple[DivisionReport, ...]
    passes: tuple[PassOnGraph, ...]
    graphs: tuple[GraphReport, ...]
    fallbacks: tuple[FallbackReport, ...]
    seconds: dict[str, float]
    uncompiled: tuple[UncompiledFrame, ...] = ()
    whole: tuple[WholeTensor, ...] = ()
    disk: DiskReport | None = None
    versions: dict[str, str] = field(default_factory=dict)
    subject: Subject = Subject()

    @property
    def num_programs(self) -> int:
        """Number of XLA programs compiled."""
        return sum(g.num_programs for g in self.graphs)

    @property
    def num_hits(self) -> int:
        """Number of graphs whose program is cached."""
        return sum(g.is_hit for g in self.graphs)

    @property
    def num_misses(self) -> int:
        """Number of graphs whose program is not cached."""
        return len(self.graphs) - self.num_hits
