"""What `scaling` found, as text, JSON and a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kp_dynamo.aot.report import AotReport
from kp_dynamo.explanation.text_layout import table
from kp_dynamo.hardware import CHIPS
from kp_dynamo.page.content import Page, Picture, Section, Table, Verbatim
from kp_dynamo.page.pictures import bars
from kp_dynamo.page.render import html_of, notebook_html
from kp_dynamo.page.units import unit_of_time

_GB = 1e9
_NOTE = "Times are modelled on the TPU compiler's figures: no chip ran any of these programs."


@dataclass(frozen=True)
class Size:
    """One slice.

    Attributes:
        chips: The number of its chips.
        samples: The batch of all of them.
        report: What the compiler made of it; None if the model does not fit.
        problem: Why there is no report.
    """

    chips: int
    samples: int
    report: AotReport | None
    problem: str = ""


@dataclass(frozen=True)
class Scaling:
    """A model on slices of several sizes: `text()` is for people, `to_dict()` for JSON, `to_html()` for a page.

    Attributes:
        target: The generation.
        sharding: How the parameters lie, as text.
        sizes: The slices, in the order in which they were given.
    """

    target: str
    sharding: str
    sizes: tuple[Size, ...]

    def efficiency(self, size: Size) -> float | None:
        """The samples a second of a chip, over those of the first slice that fits; None without a report."""
        first = next((s for s in self.sizes if s.report is not None), None)
        if first is None or first.report is None or size.report is None:
            return None
        speeds = [s.samples / s.chips / s.report.step_ms for s in (size, first) if s.report is not None]
        return speeds[0] / speeds[1]

    @property
    def head(self) -> tuple[str, ...]:
        """The titles of `rows`."""
        return (
            "chips", "mesh", "samples", "step ms", "exposed ms", "tokens/s", "of a chip", "MFU",
            f"GB a {CHIPS[self.target].device_word}", "fits", "USD/M tokens",
        )  # fmt: skip

    def text(self) -> str:
        """The table; a slice that does not fit has a line of its own below it."""
        problems = [f"{size.chips} chips: {size.problem}" for size in self.sizes if size.problem]
        title = f"scaling on {self.target}, sharding {self.sharding}, samples of a chip constant"
        return "\n".join([title, *table([self.head, *self.rows()], 2), *problems, _NOTE])

    def __str__(self) -> str:
        return self.text()

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The cells of each slice that fits, as text."""
        for size in self.sizes:
            found = size.report
            if found is None or found.slice is None:
                continue
            tokens = "-" if found.tokens_per_s is None else f"{found.tokens_per_s:.0f}"
            price = found.usd_per_million_tokens
            yield (
                f"{size.chips} ({found.slice.topology})", found.slice.mesh, str(size.samples), f"{found.step_ms:.3f}",
                f"{found.exposed_ms:.3f}", tokens, f"{self.efficiency(size) or 0:.0%}", f"{found.mfu:.1%}",
                f"{found.step_peak_bytes / _GB:.2f}", "yes" if found.fits else "NO",
                "-" if price is None else f"{price:.3g}",
            )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable form, with the report of each slice."""
        sizes = [
            {
                "chips": size.chips,
                "samples": size.samples,
                "problem": size.problem,
                "efficiency": self.efficiency(size),
                "report": None if size.report is None else size.report.to_dict(),
            }
            for size in self.sizes
        ]
        return {"target": self.target, "sharding": self.sharding, "sizes": sizes}

    def to_html(self, date: str = "") -> str:
        """One page without scripts or a network; `date` is shown, such as "2026-03-01"."""
        fitting = [size for size in self.sizes if size.report is not None]
        last = fitting[-1] if fitting else None
        kept = "" if last is None else f": {self.efficiency(last) or 0:.0%} of the speed of a chip is kept"
        headline = f"{len(fitting)} of {len(self.sizes)} slices compiled{kept}."
        sections = (
            Section("times", "Time of a step", (_picture(fitting),) if fitting else ()),
            Section("table", "The slices", (Table(self.head, tuple(self.rows()), 2),)),
            Section("text", "The same as text", (Verbatim("as the terminal shows it", self.text()),)),
        )
        title = f"kp_tpu: scaling on {self.target}, {self.sharding}"
        return html_of(Page(title, headline, (), (), sections, note=_NOTE, about=(date,) if date else ()))

    def _repr_html_(self) -> str:
        return notebook_html(self.to_html())


def _picture(sizes: Sequence[Size]) -> Picture:
    """Compute and exposed communication of each slice."""
    reports = {f"{size.chips} chips": size.report for size in sizes if size.report is not None}
    unit = unit_of_time(max(report.step_ms for report in reports.values()))
    rows = {
        name: {"compute": r.modelled_ms * unit.per_ms, "exposed communication": r.exposed_ms * unit.per_ms}
        for name, r in reports.items()
    }
    caption = "Each chip has as many samples on all slices: a bar as long as the first is perfect scaling."
    return Picture(bars("scaling", "Time of a step by the number of chips", rows, unit.name), caption)
