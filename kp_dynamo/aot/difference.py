"""Compares two reports, and whether the second is worse than a threshold allows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kp_dynamo.aot.module_times import of_all_layers
from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.slice_text import where_text
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.graph.places import unnumbered

# Figures that should not grow.
_COMPARED = ("modelled_ms", "estimated_ms", "peak_bytes", "bytes", "flops")
_COMPARED_ON_SLICES = ("step_ms", "exposed_ms", *_COMPARED)


@dataclass(frozen=True)
class Difference:
    """One figure in two reports."""

    figure: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else float(self.after != 0) + 1.0

    def __str__(self) -> str:
        return f"{self.figure:<14}{self.before:>16.6g}{self.after:>16.6g}{self.ratio:>10.4f}"


@dataclass(frozen=True)
class Comparison:
    """The comparison of two reports.

    Attributes:
        differences: One per figure.
        threshold: Ratio above which a figure counts as worse.
        remarks: Caveats: different targets, options, or numbers of operations without an estimate.
        new: Graph breaks and operators on the CPU that only the second report has.
        modules: The modelled milliseconds of each module's own operators.
        sides: What the first report is of, and the second: file, model and chips.
    """

    differences: tuple[Difference, ...]
    threshold: float
    remarks: tuple[str, ...]
    new: tuple[str, ...] = ()
    modules: tuple[Difference, ...] = ()
    sides: tuple[str, str] = ("", "")

    @property
    def worse(self) -> tuple[str, ...]:
        """Figures that grew by more than the threshold."""
        return tuple(d.figure for d in self.differences if d.ratio > self.threshold)

    @property
    def is_worse(self) -> bool:
        """Whether a figure grew by more than the threshold, or a graph break or an operator on the CPU is new."""
        return bool(self.worse or self.new)

    def __str__(self) -> str:
        grown = f"worse past {self.threshold:g}x: {', '.join(self.worse)}" if self.worse else ""
        verdict = grown or (f"worse: {len(self.new)} new" if self.new else "nothing is worse")
        head = f"{'figure':<14}{'before':>16}{'after':>16}{'ratio':>10}"
        new = [f"new: {line}" for line in self.new]
        return "\n".join([head, *map(str, self.differences), *new, *self.remarks, verdict])

    def to_dict(self) -> dict[str, object]:
        """Plain, JSON-serializable values."""
        rows = [{"figure": d.figure, "before": d.before, "after": d.after, "ratio": d.ratio} for d in self.differences]
        return {
            "rows": rows,
            "threshold": self.threshold,
            "worse": self.worse,
            "remarks": self.remarks,
            "new": self.new,
            "sides": self.sides,
        }


def compare(
    before: AotReport, after: AotReport, threshold: float = 1.02, names: tuple[str, str] = ("", "")
) -> Comparison:
    """Compare the figures of a step in two reports.

    Args:
        before: The first one.
        after: The second one.
        threshold: Ratio above which a figure counts as worse.
        names: What to call the two, such as the names of their files.

    Raises:
        TPUConfigurationError: The threshold is not a positive, finite ratio.
    """
    if not 0 < threshold < math.inf:
        raise TPUConfigurationError(f"threshold={threshold} is invalid. Allowed: a ratio > 0, such as 1.02.")
    figures = _COMPARED if before.slice is after.slice is None else _COMPARED_ON_SLICES
    differences = tuple(Difference(f, getattr(before, f), getattr(after, f)) for f in figures)
    new = tuple(sorted((_problems(after) - _problems(before)).elements()))
    one, other = _own_ms(before), _own_ms(after)
    modules = tuple(Difference(path, one.get(path, 0.0), other.get(path, 0.0)) for path in one | other)
    first, second = (_side(report, name) for report, name in zip((before, after), names, strict=True))
    return Comparison(differences, threshold, tuple(_remarks(before, after)), new, modules, (first, second))


def _side(report: AotReport, name: str) -> str:
    """ "old.json, Gpt on one v5e"."""
    model = f"{report.subject.model} on " if report.subject.model else ""
    return f"{f'{name}, ' if name else ''}{model}{where_text(report)}"


def _problems(report: AotReport) -> Counter[str]:
    breaks = (f"graph break at {unnumbered(line)}" for line in report.graph_breaks)
    return Counter([*breaks, *(f"on the CPU: {unnumbered(line)}" for line in report.fallbacks)])


def _own_ms(report: AotReport) -> dict[str, float]:
    """Modelled milliseconds of a step by module, in its own operators."""
    found: dict[str, float] = {}
    for program in report.programs:
        for row, count in of_all_layers(program.by_module, program.modules, program.runs, program.layers):
            path = row.path or "outside of submodules"
            found[path] = found.get(path, 0.0) + count * row.modelled_ms
    return found


def _remarks(before: AotReport, after: AotReport) -> Iterator[str]:
    for name in ("target", "backend", "train", "options"):
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            yield f"{name}: {one} -> {other}"
    if before.slice != after.slice:
        yield f"chips: {where_text(before)} -> {where_text(after)}"
    if before.custom_call_ms != after.custom_call_ms:
        yield (
            f"rooflines of custom calls: {before.custom_call_ms:.3f} -> {after.custom_call_ms:.3f} ms of modelled_ms; "
            "they take at least that"
        )
    if len(before.unknown) != len(after.unknown):
        yield (
            f"operations without an estimate: {len(before.unknown)} -> {len(after.unknown)}; "
            "estimated_ms is not comparable"
        )


def read_report(path: str) -> AotReport:
    """Read a report from a JSON file.

    Raises:
        TPUConfigurationError: The file does not exist, or is not a report of this version.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as cause:
        raise TPUConfigurationError(
            f"{path} cannot be read as JSON: {cause}. Allowed: a file that --json wrote."
        ) from cause
    return AotReport.from_dict(content)
