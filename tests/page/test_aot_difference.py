"""Two reports of a step compared, as a page: what is worse, what is new, which modules changed."""

from __future__ import annotations

import json
from dataclasses import replace

from kp_dynamo.aot.difference import compare
from kp_dynamo.aot.difference_page import comparison_html
from kp_dynamo.cli.main import FAILED, OK, main
from kp_dynamo.explanation.subject import Subject
from tests.page.test_aot_page import BLOCKS, BROKEN, DEEP, PARTS, REPORT
from tests.page.test_render import BAD, check

SLOWER = (replace(PARTS[1], modelled_ms=0.03), *PARTS[2:])  # the attention takes twice as long; a module is gone


def test_modules_are_compared_in_all_their_runs():
    slower = replace(DEEP, programs=tuple(replace(p, by_module=SLOWER) for p in BLOCKS.programs))
    runs = sum(p.runs / max(1, len(p.modules)) for p in BLOCKS.programs if p.modules)
    found = {d.figure: d for d in compare(DEEP, slower).modules}
    attention = found["model.layers.0.attn"]
    assert attention.after == 2 * attention.before
    assert attention.before >= runs * PARTS[1].modelled_ms
    page = comparison_html(compare(DEEP, slower))
    check(page)
    modules = page[page.index('id="modules"') : page.index('id="text"')]
    assert modules.index("model.layers.0.attn") < modules.index("2.000x")
    assert "layers.0.mlp" not in modules


def test_a_new_graph_break_is_worse_and_its_line_may_move():
    broken = replace(REPORT, graph_breaks=(f"model.py:7 in {BAD}: it is {BAD}",))
    comparison = compare(REPORT, broken)
    assert comparison.worse == ()
    assert comparison.is_worse
    assert str(comparison).endswith("worse: 1 new")
    assert not compare(broken, REPORT).is_worse
    moved = replace(REPORT, graph_breaks=(f"model.py:99 in {BAD}: it is {BAD}",))
    assert not compare(broken, moved).is_worse
    check(comparison_html(comparison))


def test_the_headline_says_what_grew():
    page = comparison_html(
        compare(DEEP, replace(DEEP, programs=tuple(replace(p, temp_bytes=2**34) for p in DEEP.programs)))
    )
    assert "<h1>Worse: peak memory " in page
    assert "<h1>Nothing is worse.</h1>" in comparison_html(compare(DEEP, DEEP))


def test_both_reports_and_their_chips_are_named():
    other = replace(REPORT, target="v6e", subject=Subject("Gpt", ()))
    page = comparison_html(compare(REPORT, other, names=("old.json", BAD)), date="2026-03-01")
    check(page)
    assert "before: old.json, one v5e &middot; after: " in page
    assert "&amp;, Gpt on one v6e &middot; 2026-03-01</p>" in page
    assert "before: one v5e" in comparison_html(compare(REPORT, REPORT))


def test_the_command_line(tmp_path, capsys):
    for name, report in (("deep", DEEP), ("broken", BROKEN)):
        (tmp_path / f"{name}.json").write_text(json.dumps(report.to_dict()))
    files = [f"{tmp_path}/deep.json", f"{tmp_path}/broken.json"]
    written = ["--html", f"{tmp_path}/diff.html", "--json", f"{tmp_path}/diff.json"]
    assert main(["aot", "--diff", *files, *written]) == FAILED
    assert "new: graph break at model.py" in capsys.readouterr().out
    page = (tmp_path / "diff.html").read_text()
    assert page.startswith("<!doctype html>")
    assert f"before: {files[0]}, one v5e" in page
    assert json.loads((tmp_path / "diff.json").read_text())["new"]
    assert main(["aot", "--diff", files[0], files[0]]) == OK
