"""The pages in a real browser: at two widths, closed and open, light and dark, nothing overflows or overlaps.

The screenshots are in `out/pages/`, for a person to look at.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path

import pytest

from kp_dynamo.aot.difference import compare
from kp_dynamo.aot.difference_page import comparison_html
from kp_dynamo.explanation.difference import compare_explanations
from kp_dynamo.explanation.difference_page import difference_html
from tests.page.browser import INSTALL, WIDTHS, chromium, look
from tests.page.defects import DEFECTS
from tests.page.test_aot_page import REPORTS
from tests.page.test_explain_page import FULL, PLAIN
from tests.page.test_plan_page import PLANS

FOLDER = Path(__file__).parents[2] / "out" / "pages"
PAGES = {
    "explain-problems": partial(FULL.to_html, verbose=True),
    "explain-nothing-wrong": partial(PLAIN.to_html, verbose=True),
    **{f"aot-{name}": partial(report.to_html, verbose=True) for name, report in REPORTS.items()},
    **{f"plan-{name}": plan.to_html for name, plan in PLANS.items()},
    "explain-diff": partial(difference_html, compare_explanations(PLAIN.to_dict(), FULL.to_dict())),
    "aot-diff": partial(comparison_html, compare(REPORTS["deep"], REPORTS["broken"])),
}

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", autouse=True)
def _browser() -> None:
    """Installs Chromium where this user may."""
    if chromium() is None and os.geteuid() == 0:
        subprocess.run(["apt-get", "update"], check=False, capture_output=True)
        subprocess.run(INSTALL.split(), check=False, capture_output=True)
    if chromium() is None:
        pytest.fail(f"the pages are tested in Chromium, which is not installed. Try: {INSTALL}", pytrace=False)


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows_or_overlaps(name, is_open, size):
    assert look(PAGES[name](), size, FOLDER / name, is_open=is_open) == []


def test_the_page_in_the_dark_is_shown_as_well():
    assert look(FULL.to_html(), "phone", FOLDER / "explain-problems", is_open=True, is_dark=True) == []


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name, tmp_path):
    added, finding = DEFECTS[name]
    found = look(PLAIN.to_html().replace("</main>", f"{added}</main>"), "phone", tmp_path, is_open=False)
    assert any(line.startswith(f"phone: {finding}") for line in found), found
