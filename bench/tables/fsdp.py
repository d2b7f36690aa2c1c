"""The table of what is exposed of the communication of "fsdp"."""

from __future__ import annotations

from bench.fsdp import CHIPS, DTYPES, FLAGS
from bench.tables.results import load, markdown, text, with_caption


def fsdp() -> str:
    """A line for each number of chips and set of flags, with the figures of both dtypes of the gradients."""
    results = load("fsdp")
    names = [name for dtype in DTYPES for name in (f"{dtype}: step ms", "exposed ms", "exposed")]
    lines = []
    for chips in CHIPS:
        for flags in FLAGS:
            found = [results.row(chips=chips, flags=flags, gradients=dtype) for dtype in DTYPES]
            cells = [
                text(row[name], form)
                for row in found
                for name, form in (("step ms", ".0f"), ("exposed ms", ".0f"), ("exposed share", ".0%"))
            ]
            lines.append([str(chips), flags, *cells])
    return with_caption(results, markdown(("chips", "flags", *names), lines))
