"""Compares two reports, and whether the second is worse than a threshold allows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.slice_text import where_text
from kp_dynamo.exceptions import TPUConfigurationError

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
    """

    differences: tuple[Difference, ...]
    threshold: float
    remarks: tuple[str, ...]

    @property
    def worse(self) -> tuple[str, ...]:
        """Figures that grew by more than the threshold."""
        return tuple(d.figure for d in self.differences if d.ratio > self.threshold)

    def __str__(self) -> str:
        verdict = f"worse past {self.threshold:g}x: {', '.join(self.worse)}" if self.worse else "nothing is worse"
        head = f"{'figure':<14}{'before':>16}{'after':>16}{'ratio':>10}"
        return "\n".join([head, *map(str, self.differences), *self.remarks, verdict])

    def to_dict(self) -> dict[str, object]:
        """Plain, JSON-serializable values."""
        rows = [{"figure": d.figure, "before": d.before, "after": d.after, "ratio": d.ratio} for d in self.differences]
        return {"rows": rows, "threshold": self.threshold, "worse": self.worse, "remarks": self.remarks}


def compare(before: AotReport, after: AotReport, threshold: float = 1.02) -> Comparison:
    """Compare the figures of a step in two reports.

    Raises:
        TPUConfigurationError: The threshold is not a positive, finite ratio.
    """
    if not 0 < threshold < math.inf:
        raise TPUConfigurationError(f"threshold={threshold} is invalid. Allowed: a ratio > 0, such as 1.02.")
    figures = _COMPARED if before.slice is after.slice is None else _COMPARED_ON_SLICES
    differences = tuple(Difference(f, getattr(before, f), getattr(after, f)) for f in figures)
    return Comparison(differences, threshold, tuple(_remarks(before, after)))


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
