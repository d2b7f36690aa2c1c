"""The result of `explain`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from kp_dynamo.explanation.disk_report import DiskReport, disk_lines
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
from kp_dynamo.explanation.ledger_text import ledger_lines
from kp_dynamo.explanation.page_content import page_of
from kp_dynamo.explanation.pass_text import pass_lines
from kp_dynamo.explanation.report_text import (
    break_lines,
    capture_lines,
    division_lines,
    fallback_lines,
    graph_lines,
    section,
    uncompiled_lines,
    whole_lines,
)
from kp_dynamo.explanation.subject import Subject
from kp_dynamo.explanation.text_layout import counted, wrapped
from kp_dynamo.page.render import html_of, notebook_html


@dataclass(frozen=True)
class Explanation:
    """The report of one run of a model; `text()` is for people, `to_dict()` for JSON, `to_html()` for a page.

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

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        totals = {"programs": self.num_programs, "hits": self.num_hits, "misses": self.num_misses}
        return {**asdict(self), "totals": totals}

    def text(self, verbose: bool = False) -> str:
        """The report for people; `str()` gives the short form.

        Args:
            verbose: Show every pass on every graph and every refusal, and the files of libraries beside their modules.
        """
        return wrapped(
            [
                *uncompiled_lines(self.uncompiled),
                *section("graph breaks", self.graph_breaks, break_lines),
                *section("graphs captured by Dynamo", self.captures, capture_lines),
                *division_lines(self.divisions, verbose),
                *pass_lines(self.passes, verbose),
                *ledger_lines(self.passes),
                *section("graphs lowered", self.graphs, graph_lines),
                f"XLA programs: {self.num_programs}",
                f"compile cache: {counted(self.num_hits, 'hit')}, {counted(self.num_misses, 'miss', 'misses')}",
                *disk_lines(self.disk),
                *whole_lines(self.whole),
                *section("operators on the CPU", self.fallbacks, partial(fallback_lines, verbose=verbose)),
                f"seconds: {', '.join(f'{stage} {value:.2f}' for stage, value in self.seconds.items())}",
            ]
        )

    def to_html(self, verbose: bool = False, date: str = "") -> str:
        """One page that needs no network and no scripts: what is wrong, seconds, programs, passes, the cache.

        Args:
            verbose: As for `text`.
            date: The date to show, such as "2026-03-01"; without one, equal reports give equal pages.
        """
        return html_of(page_of(self, verbose, date))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return notebook_html(self.to_html())

    def __str__(self) -> str:
        return self.text()
