"""The tables of README.md and docs are those of bench/results/*.json."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from bench import measurements, report
from bench.measurements import PAGES, ROOT, names, outdated
from bench.tables import TABLES, results

MEASURED = sorted(path.name for path in report.RESULTS.glob("*.json"))
SUMMARIZED = {"first_call", "second_compile", "per_call", "step_time", "buckets", "v5e"}


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A folder with copies of the results, which the tables now read, and of the pages."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    shutil.copytree(report.RESULTS, tmp_path / "results")
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        shutil.copy(ROOT / page, tmp_path / page)
    return tmp_path


def test_tables_match_the_results():
    assert outdated() == [], "Try: make measurements"


def test_every_table_is_on_one_page():
    pages = [(ROOT / page).read_text() for page in PAGES]
    assert sorted(name for page in pages for name in names(page)) == sorted(TABLES)
    assert sum(page.count("<!-- table:") for page in pages) == len(TABLES)


@pytest.mark.parametrize("name", MEASURED)
def test_a_changed_result_makes_pages_outdated_until_they_are_written(copied, name):
    path = copied / "results" / name
    content = json.loads(path.read_text())
    for row in content["rows"]:
        row |= {key: cell * 1.5 for key, cell in row.items() if isinstance(cell, float)}
    path.write_text(json.dumps(content))
    elsewhere = {"published": "docs/planner.md", "fsdp": "docs/sharding.md", "tensor": "docs/sharding.md"}
    page = elsewhere.get(path.stem, "docs/measurements.md")
    shows = {name: name == page or (name == "README.md" and path.stem in SUMMARIZED) for name in PAGES}
    assert outdated(copied) == [page for page in PAGES if shows[page]]
    measurements.write(copied)
    assert outdated(copied) == []


def test_a_figure_edited_by_hand_makes_a_page_outdated(copied):
    page = copied / "README.md"
    page.write_text(page.read_text().replace("| first call of a 32-block Llama", "| first call"))
    assert outdated(copied) == ["README.md"]


def test_a_figure_that_links_to_the_measurements_is_there():
    measured = (ROOT / "docs" / "measurements.md").read_text()
    pages = {path.name: path.read_text().split("\n\n") for path in (ROOT / "docs").glob("*.md")}
    linked = [(page, p) for page, paragraphs in pages.items() for p in paragraphs if "(measurements.md" in p]
    figures = [(page, figure) for page, p in linked for figure in re.findall(r"(?<![\w.])\d+\.\d+", p)]
    assert len(figures) > 20
    assert [(page, figure) for page, figure in figures if figure not in measured] == []


def test_text_outside_the_tables_stays():
    page = "before\n<!-- table: goals -->\nold\n<!-- end of table -->\nafter\n"
    made = measurements.generated(page)
    assert made == page.replace("old", TABLES["goals"]())
    assert measurements.generated(made) == made


def test_an_unknown_table_is_an_error():
    with pytest.raises(KeyError, match="no_such_table"):
        measurements.generated("<!-- table: no_such_table -->\n<!-- end of table -->")
