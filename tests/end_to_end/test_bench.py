"""How the benchmarks take turns, judge and print; their figures are never asserted."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from bench import bench_components, report, timing, workloads
from bench.bench_components import Case
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


# Equal programs are not compiled again.
new_sizes = itertools.count(2711)


def case(compiles: bool, runs_compiled: bool) -> Case:
    """Two repetitions of something that compiles a program, or does not, whatever the case says of it."""

    def prepare():
        size = next(new_sizes)
        run = torch.compile(lambda x: x * 2.5 + 1, backend="kp_tpu", dynamic=False) if runs_compiled else torch.neg
        return lambda: run(torch.ones(size))

    return Case("some", "thing", 0.5, prepare, repetitions=2, compiles=compiles)


@pytest.mark.parametrize("compiles", [True, False])
def test_a_component_is_timed_with_the_programs_it_compiled(compiles):
    row = bench_components.measured(case(compiles, compiles))
    assert row["ms"] > 0
    assert (row["programs"], row["report ms"]) == (int(compiles), "0.50")


@pytest.mark.parametrize("compiles", [True, False])
def test_a_figure_that_would_mean_nothing_is_an_error(compiles):
    """The earlier report's compilations took 0.00 ms: nothing was compiled."""
    with pytest.raises(RuntimeError, match="some, thing: programs by repetition"):
        bench_components.measured(case(compiles, not compiles))
