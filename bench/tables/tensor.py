"""The table of what the passes for meshes make of tensor parallelism."""

from __future__ import annotations

from bench.tables.results import load, markdown, text, with_caption


def tensor() -> str:
    """A line for each mesh and each set of passes."""
    results = load("tensor")
    titles = {"step ms": ".0f", "links ms": ".0f", "exposed ms": ".0f", "peak GB": ".1f"}
    lines = [
        [row["mesh"], row["passes"], *(text(row[name], form) for name, form in titles.items())] for row in results.rows
    ]
    return with_caption(results, markdown(("mesh", "passes", *titles), lines))
