"""Aligned tables and wrapped lines of a report's text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

WIDTH = 110


def table(rows: Sequence[Sequence[str]], num_left: int = 1) -> Iterator[str]:
    """Rows with their columns aligned, two spaces apart: the first `num_left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:num_left], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[num_left:], widths[num_left:], strict=True)]
        yield "  ".join(left + right).rstrip()


def rows_with_details(
    rows: Sequence[tuple[str, ...]], details: Sequence[tuple[str, ...]], num_left: int = 1
) -> Iterator[str]:
    """A table whose first row is its head; the details of each other row follow it. Nothing if there are no others."""
    if details:
        for row, lines in zip(table(rows, num_left), ((), *details), strict=True):
            yield row
            yield from (f"  {line}" for line in lines)


def wrapped(lines: Iterable[str]) -> str:
    """The lines as text of at most `WIDTH` columns; continued lines are indented. Words, such as paths, stay whole."""
    return "\n".join(part for line in lines for part in _parts(line))


def _parts(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    kept = line.replace(" (", "\xa0(")  # textwrap does not break there, which keeps "layers.0 (Linear)" together
    parts = textwrap.wrap(kept, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [part.replace("\xa0", " ") for part in parts] or [""]


def counted(number: int, noun: str, plural: str = "") -> str:
    """ "1 hit", "2 hits", "2 misses"."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def first_of(items: Sequence[str], most: int | None) -> Iterator[str]:
    """The first `most` items, and how many more there are; all if `most` is None."""
    yield from items[:most]
    if most is not None and len(items) > most:
        yield f"and {len(items) - most} more"
