"""A matplotlib figure as an SVG element that takes its colors from the page, with text as text.

matplotlib writes fixed colors. The figure is drawn in marker colors, which become variables of the style sheet: the
same drawing is then right on a light page, a dark page and paper.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import wraps
from html import escape
from typing import Any, ParamSpec

from kp_dynamo.exceptions import TPUNotAvailableError

INK, FAINT, STOP = "#010203", "#010204", "#010205"
SERIES = ("#010211", "#010212", "#010213", "#010214", "#010215", "#010216", "#010217")
_VARIABLES = {
    INK: "var(--ink)",
    FAINT: "var(--line)",
    STOP: "var(--stop)",
    **{color: f"var(--series-{i})" for i, color in enumerate(SERIES, 1)},
}
Given = ParamSpec("Given")

_MARKER = re.compile("|".join(_VARIABLES))
_NAMESPACES = re.compile(r' xmlns(?::\w+)?="[^"]*"| version="1.1"')
_COMMENTS = re.compile(r"<!--.*?-->", re.DOTALL)
_STYLE = re.compile(r"<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)  # it would hold for the whole page
_IDS = re.compile(r'(id="|href="#|url\(#)')
_WIDTH_INCHES = 5.4  # on a phone, a wider picture would have letters that nobody can read

_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched and selected
    "svg.hashsalt": "kp_dynamo",  # equal figures have equal ids
    "text.parse_math": False,  # a module may be named "$x$"
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.labelsize": 10,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def in_page_colors(function: Callable[Given, str]) -> Callable[Given, str]:
    """Makes all that the function draws take the colors of the page, also what matplotlib makes late.

    The function raises TPUNotAvailableError if matplotlib is not installed.
    """

    @wraps(function)
    def drawn(*args: Given.args, **kwargs: Given.kwargs) -> str:
        try:
            import matplotlib as mpl
            import matplotlib.figure
        except ImportError as cause:
            raise TPUNotAvailableError(
                'the pictures of the page need matplotlib. Try: pip install "kp_dynamo[tpu]"'
            ) from cause
        with mpl.rc_context(_SETTINGS):
            return function(*args, **kwargs)

    return drawn


class Drawing:
    """One pair of axes, to draw on, in a function that is `in_page_colors`.

    Args:
        name: A word of the page, which makes the ids of its elements unique.
        height: Inches; the width is that of the page.
        title: What it shows, for those who cannot see it.
    """

    def __init__(self, name: str, height: float, title: str) -> None:
        from matplotlib.figure import Figure

        self.name, self.title = name, title
        self.figure: Any = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        self.figure.patch.set_visible(False)
        self.axes: Any = self.figure.add_subplot()
        self.axes.patch.set_visible(False)
        self.axes.spines[["top", "right"]].set_visible(False)

    def legend(self, num_columns: int) -> None:
        """The names of the colors, below the axes."""
        self.figure.legend(loc="outside lower center", ncols=num_columns, frameon=False, fontsize=9)

    def svg(self) -> str:
        """The figure as an SVG element; equal figures give equal text."""
        text = io.StringIO()
        without = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(text, format="svg", metadata=without)
        drawn = text.getvalue()
        return self._of_the_page(drawn[drawn.index("<svg") :].strip())

    def _of_the_page(self, svg: str) -> str:
        svg = _NAMESPACES.sub("", svg.replace("xlink:href", "href"))
        svg = _COMMENTS.sub("", _STYLE.sub("", svg))
        svg = _IDS.sub(rf"\g<1>{self.name}-", svg)
        svg = _MARKER.sub(lambda found: _VARIABLES[found[0]], svg)
        svg = re.sub(r"\s*\n\s*", " ", svg)
        return re.sub(r"<svg[^>]*viewBox=(\"[^\"]*\")[^>]*>", self._opening, svg, count=1)

    def _opening(self, found: re.Match[str]) -> str:
        label = escape(self.title, quote=True)
        return f'<svg viewBox={found[1]} role="img" aria-label="{label}">'
