"""The result of `plan`: figures, as text, JSON and an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.explanation.subject import Subject
from kp_dynamo.page.render import html_of, notebook_html
from kp_dynamo.planner.code_lines import code_of
from kp_dynamo.planner.page_content import page_of
from kp_dynamo.planner.plan_figures import PlanFigures, PlanRow
from kp_dynamo.planner.result_text import text_of

SCHEMA = 1
"""Version of the JSON form."""


@dataclass(frozen=True)
class Plan(PlanFigures):
    """A plan: `text()` is for people, `to_dict()` for JSON, `to_html()` for a page.

    Its attributes are those of `PlanFigures`.
    """

    @property
    def code(self) -> str:
        """Lines of Python that run the winner; if that needs several hosts, the best way on one."""
        return code_of(self)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable form; `from_dict` is its inverse."""
        return {"schema": SCHEMA, **asdict(self), "code": self.code}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`.

        Raises:
            TPUConfigurationError: The content is no plan, or of another version.
        """
        found = content.get("schema") if isinstance(content, Mapping) else None
        if found != SCHEMA:
            raise TPUConfigurationError(
                f"schema={found!r} of the plan is invalid. Allowed: {SCHEMA}. Try: write the plan again with "
                "python -m kp_dynamo plan SPEC --json FILE."
            )
        given = {name: value for name, value in content.items() if name not in ("schema", "code")}
        try:
            one_host = given["one_host"]
            lists = {
                "rows": tuple(PlanRow(**row) for row in given["rows"]),
                "one_host": None if one_host is None else PlanRow(**one_host),
                "targets": tuple(given["targets"]),
                "subject": Subject.from_dict(given["subject"]) if "subject" in given else Subject(),
            }
            return cls(**{**given, **lists})
        except (KeyError, TypeError) as cause:
            raise TPUConfigurationError(
                f"the plan of version {SCHEMA} is incomplete: {cause}. Try: write the plan again."
            ) from cause

    def text(self) -> str:
        """The plan for people."""
        return text_of(self)

    def to_html(self, date: str = "") -> str:
        """The plan as one page, without scripts or a network; `date` is shown, such as "2026-03-01"."""
        return html_of(page_of(self, date))

    def _repr_html_(self) -> str:
        return notebook_html(self.to_html())

    def __str__(self) -> str:
        return self.text()
