"""The result of `explain`: figures, as text, JSON and an HTML page."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kp_dynamo.explanation.figures import ExplanationFigures
from kp_dynamo.explanation.page_content import page_of
from kp_dynamo.explanation.report_text import text_of
from kp_dynamo.page.render import html_of, notebook_html


@dataclass(frozen=True)
class Explanation(ExplanationFigures):
    """The report of one run of a model; `text()` is for people, `to_dict()` for JSON, `to_html()` for a page.

    Its attributes are those of `ExplanationFigures`.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        totals = {"programs": self.num_programs, "hits": self.num_hits, "misses": self.num_misses}
        return {**asdict(self), "totals": totals}

    def text(self, verbose: bool = False) -> str:
        """The report for people; `str()` gives the short form.

        Args:
            verbose: Show every pass on every graph and every refusal, and the files of libraries beside their modules.
        """
        return text_of(self, verbose)

    def to_html(self, verbose: bool = False, date: str = "") -> str:
        """One page that needs no network and no scripts: what is wrong, seconds, programs, passes, the cache.

        Args:
            verbose: As for `text`.
            date: The date to show, such as "2026-03-01"; without one, equal reports give equal pages.
        """
        return html_of(page_of(self, verbose, date))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return notebook_html(self.to_html())

    def __str__(self) -> str:
        return self.text()
