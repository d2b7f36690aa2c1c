"""What a page holds, as plain values. A report makes a `Page`; `render` turns it into HTML.

All texts are plain text: the template escapes them. The one exception is `Picture.svg`, which `drawing` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Level = Literal["stop", "slow", "note"]


@dataclass(frozen=True)
class Figure:
    """A figure in large type: `label` "Peak memory", `value` "1.9 GiB", `detail` "of 13.4 GiB".

    Attributes:
        share: What part of the detail the value is, for a bar; None for no bar.
    """

    label: str
    value: str
    detail: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Problem:
    """Something wrong, or worth knowing.

    Attributes:
        level: "stop" (it does not run, or not as it should), "slow" (it costs time) or "note".
        what: One sentence.
        where: The user's line, or the module.
        source: The text of that line.
        cure: What to do.
        details: More text, folded.
    """

    level: Level
    what: str
    where: str = ""
    source: str = ""
    cure: str = ""
    details: str = ""


@dataclass(frozen=True)
class Share:
    """A cell of a table: a part of a whole, as a bar and in percent."""

    of_one: float

    @property
    def percent(self) -> float:
        """0 to 100, for the width of the bar."""
        return 100 * min(max(self.of_one, 0.0), 1.0)

    def __str__(self) -> str:
        return f"{self.of_one:.0%}" if self.of_one >= 0.01 or not self.of_one else "< 1%"


Cell = str | Share


@dataclass(frozen=True)
class Table:
    """Rows of cells below a head. The first `num_left` columns hold text, the others figures.

    Attributes:
        details: Text below each row, such as the lines of an operation; () for none.
        folded: If not "", the table is closed, and this is its title.
    """

    kind: ClassVar[str] = "table"
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    num_left: int = 1
    details: tuple[tuple[str, ...], ...] = ()
    caption: str = ""
    folded: str = ""

    @property
    def rows_with_details(self) -> list[tuple[tuple[Cell, ...], tuple[str, ...]]]:
        """Each row with its details."""
        return list(zip(self.rows, self.details or ((),) * len(self.rows), strict=True))


@dataclass(frozen=True)
class Branch:
    """A row of a tree.

    Attributes:
        label: Such as "layers x 32".
        detail: Such as the class of the module.
        cells: One for each further column of the tree.
        children: The rows that it opens to.
        is_open: Whether it is open at first.
    """

    label: str
    detail: str
    cells: tuple[Cell, ...]
    children: tuple[Branch, ...] = ()
    is_open: bool = False


@dataclass(frozen=True)
class Tree:
    """A table whose rows open."""

    kind: ClassVar[str] = "tree"
    head: tuple[str, ...]
    branches: tuple[Branch, ...]
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A drawing as an SVG element, made by `drawing`, and what it shows."""

    kind: ClassVar[str] = "picture"
    svg: str
    caption: str


@dataclass(frozen=True)
class Lines:
    """Sentences, each a paragraph or, if `listed`, an item of a list."""

    kind: ClassVar[str] = "lines"
    lines: tuple[str, ...]
    listed: bool = False


@dataclass(frozen=True)
class Verbatim:
    """Text as it is, in a box with a title that is closed at first, unless it `is_open`."""

    kind: ClassVar[str] = "verbatim"
    title: str
    text: str
    is_open: bool = False


@dataclass(frozen=True)
class Sides:
    """Two texts side by side, in a box with a title that is closed at first; on a phone one is below the other.

    Attributes:
        title: What they are.
        before: The text at the left.
        after: The text at the right.
        caption: What is left out of them.
    """

    kind: ClassVar[str] = "sides"
    title: str
    before: str
    after: str
    caption: str = ""


Part = Table | Tree | Picture | Lines | Verbatim | Sides


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    Attributes:
        name: Its anchor, such as "memory".
        title: Its heading.
        parts: What it shows, in order. A section without parts is left out.
        summary: One sentence below the heading: the answer, before the figures.
    """

    name: str
    title: str
    parts: tuple[Part, ...]
    summary: str = ""


@dataclass(frozen=True)
class Page:
    """A report, from top to bottom.

    Attributes:
        title: For the tab of a browser, and the line above the headline.
        headline: Sentences that a reader remembers.
        figures: The figures that decide.
        problems: What is wrong, the worst first.
        sections: Everything else, in order.
        note: What the figures are, below the headline.
        lead: A sentence below the headline: the answer to the next question.
        about: What the report is of, beside the title: the model, its inputs, the date.
    """

    title: str
    headline: str
    figures: tuple[Figure, ...]
    problems: tuple[Problem, ...]
    sections: tuple[Section, ...]
    note: str = ""
    lead: str = ""
    about: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[Section, ...]:
        """The sections that have something to show."""
        return tuple(section for section in self.sections if section.parts)
