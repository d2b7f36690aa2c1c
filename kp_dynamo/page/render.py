"""A page as HTML: one file without scripts, links to other files or a network."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from kp_dynamo.page.content import Page

_TEMPLATES = Path(__file__).parent / "templates"
_WORDS = {"stop": "wrong", "slow": "slow", "note": "note"}


def html_of(page: Page) -> str:
    """The page. Everything in it is escaped, except the drawings."""
    style = (_TEMPLATES / "style.css").read_text()
    return str(_template().render(page=page, style=style, words=_WORDS)) + "\n"


def notebook_html(html: str) -> str:
    """A page as a notebook shows it: in a frame of its own, so that its styles do not reach the notebook."""
    frame = "width:100%;height:44rem;border:1px solid #8888;border-radius:.4rem"
    return f'<iframe sandbox="" title="kp_dynamo" style="{frame}" srcdoc="{escape(html, quote=True)}"></iframe>'


@cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    return environment.get_template("page.html")
