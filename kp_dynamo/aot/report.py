"""What `aot_compile` returns: the figures, as text, as JSON and as a page."""

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
"""Version of the JSON form; one that is read must have this one."""


@dataclass(frozen=True)
class AotReport(AotFigures):
    """What a TPU generation makes of a model; `str()` is for people, `to_dict()` for JSON, `to_html()` a page.

    Its attributes and figures are those of `AotFigures`.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        derived = ("peak_bytes", "custom_call_ms")
        peaks = [{**asdict(p), **{name: getattr(p, name) for name in derived}} for p in self.programs]
        content = {**asdict(self), "programs": peaks, "totals": self.totals()}
        return {"schema": SCHEMA, "note": DISCLAIMER, **content}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> AotReport:
        """The report that `to_dict` gave.

        Raises:
            TPUConfigurationError: It is no such report, or of another version.
        """
        found = content.get("schema") if isinstance(content, Mapping) else None
        if found != SCHEMA:
            raise TPUConfigurationError(
                f"this is no report of version {SCHEMA} (its schema is {found!r}). Write it anew with "
                "python -m kp_dynamo aot SPEC --json FILE."
            )
        try:
            known = {f.name: content[f.name] for f in fields(cls)}
            programs = tuple(program_from_dict(p) for p in content["programs"])
        except (KeyError, TypeError) as cause:
            raise TPUConfigurationError(f"a report of version {SCHEMA} without {cause}; write it anew") from cause
        lists = {name: tuple(known[name]) for name in ("passes", "graph_breaks", "fallbacks")}
        return cls(**{**known, **lists, "programs": programs})

    def to_html(self) -> str:
        """One page that needs no network: the figures, a roofline, where the time goes, and the memory.

        Raises:
            TPUNotAvailableError: matplotlib, which draws the pictures, is not installed.
        """
        return page_of(self)

    def __str__(self) -> str:
        return text_of(self)
