"""Tables on the screen and the same figures as JSON in bench/results/."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.workloads import SEED

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Target:
    """A figure that should not exceed a limit. A miss is printed as a miss; nothing fails because of it."""

    name: str
    figure: float
    limit: float

    @property
    def is_met(self) -> bool:
        return self.figure <= self.limit

    def __str__(self) -> str:
        return f"{'met ' if self.is_met else 'MISS'}  {self.name}: {self.figure:.3g}, at most {self.limit:.3g}"


@dataclass(frozen=True)
class Report:
    """One benchmark's result.

    Attributes:
        name: Stem of its JSON file.
        title: What is measured, with the unit and the number of repetitions.
        rows: Column name -> cell, the same columns in each row.
        targets: The targets of its figures.
    """

    name: str
    title: str
    rows: list[dict[str, Any]]
    targets: tuple[Target, ...] = ()


def publish(report: Report) -> None:
    """Print the report and write it to bench/results/<name>.json."""
    print(f"\n{report.title}\n\n{table(report.rows)}\n")
    for target in report.targets:
        print(f"  {target}")
    write(report)


def last_rows(name: str) -> list[dict[str, Any]]:
    """The rows of bench/results/<name>.json; none before its first run."""
    file = RESULTS / f"{name}.json"
    found: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.is_file() else []
    return found


def last_row(name: str, **cells: object) -> dict[str, Any] | None:
    """The row of bench/results/<name>.json with these cells, or None."""
    return next((row for row in last_rows(name) if cells.items() <= row.items()), None)


def write(report: Report) -> None:
    """Write the report to bench/results/<name>.json."""
    targets = [{**asdict(target), "is_met": target.is_met} for target in report.targets]
    content = {**asdict(report), "targets": targets, "environment": environment()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{report.name}.json").write_text(json.dumps(content, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown: text to the left, numbers to the right."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[_text(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *cells]) for i in range(len(columns))]
    is_number = [any(isinstance(row.get(column), float | int) for row in rows) for column in columns]

    def line(texts: list[str]) -> str:
        padded = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(texts, widths, is_number, strict=True))
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (w - 1)}:" if n else "-" * w for w, n in zip(widths, is_number, strict=True)]
    return "\n".join([line(columns), line(rule), *map(line, cells)])


def _text(cell: object) -> str:
    return (
        f"{cell:#.3g}".rstrip(".")
        if isinstance(cell, float) and cell < 1000
        else f"{cell:.0f}"
        if isinstance(cell, float)
        else str(cell)
    )


def environment() -> dict[str, Any]:
    """The environment that the figures depend on."""
    packages = ("torch", "torch_xla", "kp_dynamo")
    return {
        "seed": SEED,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "device": os.environ.get("PJRT_DEVICE", "CPU"),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }
