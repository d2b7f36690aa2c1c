"""How the benchmarks take turns, judge and print; their figures are never asserted."""

from __future__ import annotations

import json

import pytest
import torch

from bench import report, timing, workloads
from bench.report import Report, Target


def test_turns_alternate_their_order():
    assert list(timing.turns(["a", "b"], 3)) == ["a", "b", "b", "a", "a", "b"]


def test_medians_are_taken_by_case():
    values = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 4.0, 3.0])}
    cases = {name: lambda v=taken: next(v) for name, taken in values.items()}
    assert timing.medians_of_turns(cases, 3) == {"a": 2.0, "b": 4.0}


def test_a_child_that_fails_is_an_error_with_its_reason():
    with pytest.raises(RuntimeError, match="no_such_module"):
        timing.in_fresh_process("bench.no_such_module")


def test_a_miss_is_printed_as_a_miss():
    assert str(Target("ratio", 0.9, 0.75)) == "MISS  ratio: 0.9, at most 0.75"
    assert str(Target("ratio", 0.5, 0.75)) == "met   ratio: 0.5, at most 0.75"


def test_a_table_is_markdown_with_numbers_to_the_right():
    rows = [{"variant": "eager", "ms": 12.345}, {"variant": "kp_tpu", "ms": 1234.5}]
    assert report.table(rows).splitlines() == [
        "| variant |   ms |",
        "| ------- | ---: |",
        "| eager   | 12.3 |",
        "| kp_tpu  | 1234 |",
    ]


def test_a_report_is_written_with_what_it_depends_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    report.publish(Report("some", "Some times", [{"variant": "eager", "ms": 1.0}], (Target("ratio", 2.0, 1.0),)))
    written = json.loads((tmp_path / "some.json").read_text())
    assert written["rows"] == [{"variant": "eager", "ms": 1.0}]
    assert written["targets"] == [{"name": "ratio", "figure": 2.0, "limit": 1.0, "is_met": False}]
    assert {"seed", "torch", "torch_xla", "kp_dynamo", "cores"} <= written["environment"].keys()
    assert "MISS  ratio" in capsys.readouterr().out


@pytest.mark.parametrize("name", workloads.SMALL)
def test_every_small_workload_runs(name: str) -> None:
    workload = workloads.SMALL[name]()
    with torch.no_grad():
        assert workload.model(*workload.inputs).isfinite().all()
