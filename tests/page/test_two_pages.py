"""Two pages in Chromium, in `make test`; `test_in_a_browser.py` has all, in a newer one, with screenshots."""

from __future__ import annotations

from functools import partial

import pytest

from tests.page.browser import WIDTHS
from tests.page.defects import DEFECTS
from tests.page.test_aot_page import DEEP
from tests.page.test_explain_page import FULL, PLAIN
from tests.page.wheel_browser import look_in_wheel

PAGES = {"aot-deep": partial(DEEP.to_html, verbose=True), "explain-problems": partial(FULL.to_html, verbose=True)}


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows_or_overlaps(name, is_open, size, tmp_path):
    assert look_in_wheel(PAGES[name](), size, tmp_path, is_open=is_open) == []


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name, tmp_path):
    added, finding = DEFECTS[name]
    found = look_in_wheel(PLAIN.to_html().replace("</main>", f"{added}</main>"), "phone", tmp_path, is_open=False)
    assert any(line.startswith(finding) for line in found), found


def test_what_is_folded_is_not_seen_until_it_is_opened(tmp_path):
    hidden = '<details><summary>more</summary><p style="width:3000px">far too wide</p></details>'
    page = PLAIN.to_html().replace("</main>", f"{hidden}</main>")
    assert look_in_wheel(page, "phone", tmp_path, is_open=False) == []
    assert any("the page is 30" in line for line in look_in_wheel(page, "phone", tmp_path, is_open=True))
