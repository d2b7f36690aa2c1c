"""Every kind of part as HTML: well formed, escaped, without scripts or network."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from kp_dynamo.page.content import (
    Branch,
    Figure,
    Lines,
    Page,
    Picture,
    Problem,
    Section,
    Share,
    Sides,
    Table,
    Tree,
    Verbatim,
)  # fmt: skip
from kp_dynamo.page.render import html_of, notebook_html
from kp_dynamo.page.units import part_text, short_price, size_text, time_text

BAD = '<script>alert("x")</script>&'
VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Fails if an element is not closed in order, or an id appears twice."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(html: str) -> Checker:
    """Well formed, self-contained, light and dark, printable."""
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert len(set(checker.ids)) == len(checker.ids)
    assert not checker.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    assert all(link.startswith("#") for link in re.findall(r'(?:src|href)="([^"]*)"', html))
    assert "prefers-color-scheme:dark" in html
    assert "@media print" in html
    return checker


def page(word: str) -> Page:
    leaf = Branch(word, word, (word, Share(0.25)))
    parts = (
        Table((word, "share"), ((word, Share(0.5)),), details=((word,),), caption=word, folded=word),
        Tree((word, "time", "share"), (Branch(word, word, (word, Share(1.0)), (leaf,), is_open=True),), caption=word),
        Picture('<svg viewBox="0 0 1 1"></svg>', word),
        Lines((word,), listed=True),
        Lines((word,)),
        Verbatim(word, word),
        Sides(word, word, word, word),
    )
    problem = Problem("stop", word, word, word, word, word)
    return Page(word, word, (Figure(word, word, word, 2.0),), (problem,), (Section("all", word, parts, word),), word)


def test_every_text_is_escaped_in_every_part():
    html = html_of(page(BAD))
    check(html)
    assert "&lt;script&gt;" in html
    assert html.count(BAD) == 0


def test_a_tree_opens_without_scripts():
    html = html_of(page("layer"))
    assert '<details open><summary class="row">' in html
    assert check(html).tags >= {"details", "summary", "svg"}


def test_an_empty_section_is_left_out_and_no_problem_is_said():
    html = html_of(Page("t", "h", (), (), (Section("empty", "Empty", ()),)))
    check(html)
    assert "Empty" not in html
    assert "Nothing found." in html


def test_a_bar_stays_within_its_cell():
    assert (Share(3.0).percent, Share(-1.0).percent) == (100, 0)
    assert (str(Share(0.0)), str(Share(0.001)), str(Share(0.5))) == ("0%", "< 1%", "50%")
    assert "width:100.0%" in html_of(page("layer"))


def test_a_notebook_gets_a_frame_that_runs_nothing():
    frame = notebook_html(html_of(page(BAD)))
    assert frame.startswith('<iframe sandbox=""')
    assert frame.count("<") == 2  # the frame alone: the page is an escaped attribute


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (time_text(0.0402), "40.2 us"), (time_text(13.29), "13.3 ms"), (time_text(2100), "2.1 s"),
        (time_text(450), "450 ms"), (time_text(0), "0 ms"), (size_text(12), "12 bytes"),
        (size_text(1.9 * 2**30), "1.9 GiB"), (size_text(2**20), "1.0 MiB"),
        (part_text(1.9 * 2**30, 13.4 * 2**30), "1.9 of 13.4 GiB"), (part_text(2**21, 2**30), "2.0 MiB of 1.0 GiB"),
        (short_price(0.00216, "tokens"), "USD 2.16 a billion tokens"),
        (short_price(20, "steps"), "USD 20.00 a million steps"),
    ],
)  # fmt: skip
def test_units_fit_the_size(text, expected):
    assert text == expected
