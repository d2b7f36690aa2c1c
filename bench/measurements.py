"""`make measurements`: write the tables of README.md and three pages of docs from bench/results/*.json.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; the text around it is written by hand.
With `--check` nothing is written, and the exit code is 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from bench.tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/measurements.md", "docs/planner.md", "docs/sharding.md")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def generated(page: str) -> str:
    """The text of a page with every table made anew.

    Raises:
        KeyError: A marker names an unknown table.
    """
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


def names(page: str) -> list[str]:
    """The tables of a page, in their order."""
    return [found[2] for found in _TABLE.finditer(page)]


def outdated(root: Path = ROOT) -> list[str]:
    """The pages whose tables differ from the results."""
    texts = {page: (root / page).read_text() for page in PAGES}
    return [page for page, text in texts.items() if generated(text) != text]


def write(root: Path = ROOT) -> None:
    for page in outdated(root):
        (root / page).write_text(generated((root / page).read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.measurements", description=__doc__)
    parser.add_argument("--check", action="store_true", help="name the pages that are out of date, and write nothing")
    if parser.parse_args().check:
        sys.exit(f"out of date: {', '.join(pages)}. Try: make measurements" if (pages := outdated()) else 0)
    write()


if __name__ == "__main__":
    main()
