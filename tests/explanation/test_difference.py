"""Two explanations compared: what grew, what is new and gone, and the exit code."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kp_dynamo import TPUConfigurationError
from kp_dynamo.cli.main import BAD_USAGE, FAILED, OK, main
from kp_dynamo.explanation.difference import ExplanationDifference, compare_explanations
from kp_dynamo.explanation.difference_page import difference_html
from kp_dynamo.explanation.graph_reports import GraphBreak
from kp_dynamo.explanation.reports import Explanation
from tests.page.test_explain_page import FULL, PLAIN
from tests.page.test_render import BAD, check


def compared(before: Explanation, after: Explanation, tolerance: float = 0.05) -> ExplanationDifference:
    read = [json.loads(json.dumps(found.to_dict())) for found in (before, after)]
    return compare_explanations(read[0], read[1], tolerance)


def grown(found: ExplanationDifference) -> list[str]:
    return [change.figure for change in found.worse]


def with_operators(number: int) -> Explanation:
    return replace(PLAIN, graphs=(replace(PLAIN.graphs[0], num_operators=number),))


def test_an_explanation_is_no_worse_than_itself():
    found = compared(FULL, FULL)
    assert not found.is_worse
    assert (found.worse, found.new, found.gone, found.passes, found.versions) == ((), (), (), (), ())
    assert found.text().endswith("Nothing is worse.")


def test_what_is_new_is_named_and_worse():
    found = compared(PLAIN, FULL)
    assert found.is_worse
    assert found.new == (
        "aten.special_erfcx.default on the CPU at model.py in forward",
        "graph break at model.py in forward: print(x)",
        "not compiled: model.py in odd",
    )
    assert grown(found) == [
        "graph breaks", "functions that run eagerly", "operators on the CPU", "bytes copied for them",
    ]  # fmt: skip
    assert [str(change) for change in found.passes] == ["cast_bf16 0 -> 3"]


def test_what_is_gone_is_named_and_no_worse():
    found = compared(FULL, PLAIN)
    assert not found.is_worse
    assert len(found.gone) == 3
    assert "gone: graph break at model.py in forward: print(x)" in found.text()


def test_a_problem_that_moved_to_another_line_is_not_new():
    moved = replace(FULL, graph_breaks=(GraphBreak("model.py:99 in forward", "print(x)", "as before"),))
    assert not compared(FULL, moved).is_worse


def test_a_second_break_at_one_line_is_new():
    twice = replace(FULL, graph_breaks=FULL.graph_breaks * 2)
    assert compared(FULL, twice).new == ("graph break at model.py in forward: print(x)",)


@pytest.mark.parametrize(("after", "tolerance", "is_worse"), [(105, 0.05, False), (106, 0.05, True), (101, 0.0, True)])
def test_a_figure_may_grow_by_the_tolerance(after, tolerance, is_worse):
    found = compared(with_operators(100), with_operators(after), tolerance)
    assert found.is_worse is is_worse
    assert grown(found) == ["operators"] * is_worse


def test_seconds_are_shown_and_not_judged():
    slow = replace(FULL, seconds={"dynamo": 50.0, "xla": 2.0, "passes": 0.001})
    found = compared(FULL, slow)
    assert not found.is_worse
    assert "seconds of dynamo" in found.text()
    assert "500 ms" in found.text()
    assert "50 s" in found.text()


def test_versions_that_differ_are_named():
    newer = replace(FULL, versions={"torch": "2.10.0", "jax": "1"})
    assert compared(FULL, newer).versions == (("torch", "2.9.1", "2.10.0"), ("jax", "none", "1"))


@pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf")])
def test_a_tolerance_that_is_none(tolerance):
    with pytest.raises(TPUConfigurationError, match=r"tolerance=.* is invalid. Allowed: a number >= 0"):
        compared(FULL, FULL, tolerance)


@pytest.mark.parametrize("content", [{}, {"graphs": 3}, {**FULL.to_dict(), "passes": [{"name": "x"}]}])
def test_what_is_no_explanation_is_refused(content):
    with pytest.raises(TPUConfigurationError, match=r"incomplete: .* with explain SPEC --json FILE"):
        compare_explanations(FULL.to_dict(), content)


def test_the_page_says_what_is_worse_first():
    bad = replace(FULL, graph_breaks=(GraphBreak("model.py:1 in forward", BAD, BAD),))
    page = difference_html(compared(PLAIN, bad))
    check(page)
    assert "<h1>Worse: graph breaks 0 -&gt; 1; " in page
    assert page.index("New: graph break") < page.index("<h2>All figures")
    assert "<h1>Nothing is worse.</h1>" in difference_html(compared(FULL, PLAIN))


MODEL = """
import torch
def broken(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x + 1
def make(): return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
def other(): return broken, (torch.ones(2, 4),)
"""


def test_the_command_line(tmp_path, capsys):
    (tmp_path / "model.py").write_text(MODEL)
    for name in ("make", "other"):
        assert main(["explain", f"{tmp_path}/model.py:{name}", "--json", f"{tmp_path}/{name}.json"]) == OK
        assert "graphs lowered" in capsys.readouterr().out  # the text is printed all the same
    first, second = f"{tmp_path}/make.json", f"{tmp_path}/other.json"
    assert main(["explain", "--diff", first, first]) == OK
    assert "Nothing is worse." in capsys.readouterr().out
    assert main(["explain", "--diff", first, second, "--html", f"{tmp_path}/diff.html", "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["worse"][0] == "graph breaks"
    page = (tmp_path / "diff.html").read_text()
    assert "New: graph break" in page
    assert f"before: {first}, Linear &middot; after: {second}, broken &middot; " in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either SPEC"),
        (["a.py:make", "--diff", "a", "b"], "give either SPEC"),
        (["--diff", "none.json", "none.json"], "none.json cannot be read as JSON"),
        (["a.py:make", "--html", "nowhere/a.html"], "its folder does not exist"),
        (["a.py:make", "--json", "nowhere/a.json"], "its folder does not exist"),
    ],
)
def test_bad_usage(arguments, message, capsys):
    assert main(["explain", *arguments]) == BAD_USAGE
    assert message in capsys.readouterr().err
