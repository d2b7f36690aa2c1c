"""The table of what is exposed of the communication of "fsdp"."""

from __future__ import annotations

from bench.fsdp import CHIPS, DTYPES, WAYS
from bench.tables.results import load, markdown, text, with_caption


def fsdp() -> str:
    """A line for each number of chips and way to gather, with the figures of both dtypes of the gradients."""
    results = load("fsdp")
    names = [name for dtype in DTYPES for name in (f"{dtype}: step ms", "exposed ms", "exposed")]
    lines = []
    for chips in CHIPS:
        for way in WAYS:
            found = [results.row(chips=chips, gathers=way, gradients=dtype) for dtype in DTYPES]
            cells = [
                text(row[name], form)
                for row in found
                for name, form in (("step ms", ".0f"), ("exposed ms", ".0f"), ("exposed share", ".0%"))
            ]
            lines.append([str(chips), way, *cells])
    return with_caption(results, markdown(("chips", "gathers", *names), lines))
