"""The example pages of docs/pages: all are there, small, and hold nothing of the machine that wrote them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.pages import FOLDER, PAGES
from tests.page.test_render import check

MOST_BYTES = 3_000_000
FILES = sorted(FOLDER.glob("*.html"))


def test_every_page_is_written():
    assert {path.stem for path in FILES} == set(PAGES)
    assert sum(path.stat().st_size for path in FILES) <= MOST_BYTES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_page_is_whole_and_holds_no_path_of_a_machine(path: Path):
    html = path.read_text(encoding="utf-8")
    check(html)
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|usr|opt|work|Users)/", html)
    assert str(Path.home()) not in html
