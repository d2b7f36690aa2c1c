"""One file of bench/results/, and its figures as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import RESULTS

Row = dict[str, Any]


@dataclass(frozen=True)
class Results:
    """What `bench.report.write` wrote; see `bench.report.Report`."""

    title: str
    rows: list[Row]
    targets: list[Row]
    environment: Row

    def row(self, **cells: object) -> Row:
        """The one row with these cells."""
        (found,) = (row for row in self.rows if cells.items() <= row.items())
        return found

    @property
    def caption(self) -> str:
        """What was measured, with which versions, on which machine."""
        versions = ", ".join(f"{name} {self.environment[name]}" for name in ("torch", "torch_xla"))
        return f"{self.title}. {versions}, {self.environment['cores']} cores."


def load(name: str) -> Results:
    """The results of bench/results/<name>.json."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    return Results(content["title"], content["rows"], content.get("targets", []), content["environment"])


def with_caption(results: Results, table: str) -> str:
    """The caption, the table, and the targets if there are any."""
    return "\n\n".join([results.caption, table, *([targets(results.targets)] if results.targets else [])])


def columns(rows: Iterable[Row], formats: dict[str, str]) -> str:
    """The named columns of all rows, each in its format."""
    return markdown(formats, ([text(row[name], form) for name, form in formats.items()] for row in rows))


def targets(found: list[Row]) -> str:
    rows = ([t["name"], text(t["figure"], ".3g"), text(t["limit"], ".3g"), verdict(t["is_met"])] for t in found)
    return markdown(("target", "figure", "at most", ""), rows)


def verdict(is_met: bool) -> str:
    return "met" if is_met else "missed"


def text(cell: object, form: str) -> str:
    """A missing figure is an empty cell."""
    return "" if cell is None else format(cell, form)


def slashed(cells: Iterable[object], form: str) -> str:
    """Figures of one cell, `a / b`."""
    return " / ".join(text(cell, form) for cell in cells)


def markdown(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    header = list(names)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)
