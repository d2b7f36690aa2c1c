"""The result of `aot_compile`: figures, as text, JSON and an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from kp_dynamo.aot.figures import DISCLAIMER, AotFigures
from kp_dynamo.aot.live_values import LiveValues
from kp_dynamo.aot.memory_line import ProgramCall
from kp_dynamo.aot.page_content import page_of
from kp_dynamo.aot.program_report import program_from_dict
from kp_dynamo.aot.report_text import text_of
from kp_dynamo.aot.slice_report import slice_from_dict
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.explanation.graph_reports import fallback_from_dict, pass_from_dict
from kp_dynamo.explanation.subject import Subject
from kp_dynamo.page.render import html_of, notebook_html

SCHEMA = 3
"""Version of the JSON form; `from_dict` accepts only this version."""


@dataclass(frozen=True)
class AotReport(AotFigures):
    """The report of a model compiled for a TPU; `text()` is for people, `to_dict()` for JSON, `to_html()` for a page.

    Its attributes and figures are those of `AotFigures`.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        derived = ("peak_bytes", "custom_call_ms", "exposed_ms")
        peaks = [{**asdict(p), **{name: getattr(p, name) for name in derived}} for p in self.programs]
        derived_lists = {
            "blocks": [asdict(b) for b in self.blocks],
            "collectives": [asdict(c) for c in self.collectives],
            "memory_line": [asdict(p) for p in self.memory_line],
        }
        content = {**asdict(self), "programs": peaks, "totals": self.totals(), **derived_lists}
        return {"schema": SCHEMA, "note": DISCLAIMER, **content}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> AotReport:
        """The inverse of `to_dict`.

        Raises:
            TPUConfigurationError: The content is not a report, or has another version.
        """
        found = content.get("schema") if isinstance(content, Mapping) else None
        if found != SCHEMA:
            raise TPUConfigurationError(
                f"schema={found!r} of the report is invalid. Allowed: {SCHEMA}. Try: write the report again with "
                "python -m kp_dynamo aot SPEC --json FILE."
            )
        try:
            known = {f.name: content[f.name] for f in fields(cls) if f.default is MISSING}
            programs = tuple(program_from_dict(p) for p in content["programs"])
            passes = tuple(pass_from_dict(p) for p in content.get("pass_reports", ()))
            fallbacks = tuple(fallback_from_dict(f) for f in content.get("fallback_reports", ()))
            calls = tuple(ProgramCall(**call) for call in content.get("calls", ()))
            found_slice = slice_from_dict(content.get("slice"))
            live = tuple(LiveValues(**row) for row in content.get("live_at_peak", ()))
            subject = Subject.from_dict(content["subject"]) if "subject" in content else Subject()
        except (KeyError, TypeError) as cause:
            raise TPUConfigurationError(
                f"the report of version {SCHEMA} is incomplete: {cause}. Try: write the report again."
            ) from cause
        lists = {name: tuple(known[name]) for name in ("passes", "graph_breaks", "fallbacks")}
        added = {
            "pass_reports": passes,
            "fallback_reports": fallbacks,
            "calls": calls,
            "slice": found_slice,
            "live_at_peak": live,
            "subject": subject,
            "libtpu_flags": content.get("libtpu_flags", ""),
        }
        return cls(**{**known, **lists, **added, "programs": programs})

    def to_html(self, verbose: bool = False, date: str = "") -> str:
        """One page without scripts or network: what is wrong and what to do, time by module, pictures, `text(verbose)`.

        Args:
            verbose: As for `text`.
            date: The date to show, such as "2026-03-01"; without one, equal reports give equal pages.

        Raises:
            TPUNotAvailableError: matplotlib is not installed.
        """
        return html_of(page_of(self, verbose, date))

    def _repr_html_(self) -> str:
        """The page, as a notebook shows it."""
        return notebook_html(self.to_html())

    def text(self, verbose: bool = False) -> str:
        """The report for people; `str()` gives the short form.

        Args:
            verbose: Show every pass on every graph, every refusal, every origin of an operation, and the files of
                libraries beside their modules.
        """
        return text_of(self, verbose)

    def __str__(self) -> str:
        return self.text()
