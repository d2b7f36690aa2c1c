"""The result of `aot_compile`: figures, as text, JSON and an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kp_dynamo.aot.figures import DISCLAIMER, AotFigures
from kp_dynamo.aot.page import page_of
from kp_dynamo.aot.program_report import program_from_dict
from kp_dynamo.aot.report_text import text_of
from kp_dynamo.exceptions import TPUConfigurationError

SCHEMA = 3
"""Version of the JSON form; `from_dict` accepts only this version."""


@dataclass(frozen=True)
class AotReport(AotFigures):
    """The report of a model compiled for a TPU; `str()` is for people, `to_dict()` for JSON, `to_html()` for a page.

    Its attributes and figures are those of `AotFigures`.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        derived = ("peak_bytes", "custom_call_ms")
        peaks = [{**asdict(p), **{name: getattr(p, name) for name in derived}} for p in self.programs]
        content = {**asdict(self), "programs": peaks, "totals": self.totals()}
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
            known = {f.name: content[f.name] for f in fields(cls)}
            programs = tuple(program_from_dict(p) for p in content["programs"])
        except (KeyError, TypeError) as cause:
            raise TPUConfigurationError(
                f"the report of version {SCHEMA} is incomplete: {cause}. Try: write the report again."
            ) from cause
        lists = {name: tuple(known[name]) for name in ("passes", "graph_breaks", "fallbacks")}
        return cls(**{**known, **lists, "programs": programs})

    def to_html(self) -> str:
        """One page that needs no network: the figures, a roofline, where the time goes, and the memory.

        Raises:
            TPUNotAvailableError: matplotlib is not installed.
        """
        return page_of(self)

    def __str__(self) -> str:
        return text_of(self)
