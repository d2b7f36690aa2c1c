"""How the benchmarks take turns, judge and print; their figures are never asserted."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from bench import bench_components, report, timing, workloads
from bench.bench_components import Case
from bench.loop_cost import cost_of_loop
from bench.report import Report, Target
from kp_dynamo.aot.cost import cost_of
from kp_dynamo.aot.hlo import Module
from kp_dynamo.hardware import CHIPS


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


LOOP = """
%sliced (p.1: bf16[4,128,128], p.2: s32[]) -> bf16[128,128] {
  %p.1 = bf16[4,128,128]{2,1,0} parameter(0)
  %p.2 = s32[] parameter(1)
  ROOT %dynamic-slice.1 = bf16[1,128,128]{2,1,0} dynamic-slice(%p.1, %p.2), dynamic_slice_sizes={1,128,128}
}

%updated (p.3: bf16[4,128,128], p.4: bf16[128,128], p.5: s32[]) -> bf16[4,128,128] {
  %p.3 = bf16[4,128,128]{2,1,0} parameter(0)
  %p.4 = bf16[128,128]{1,0} parameter(1)
  %p.5 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = bf16[4,128,128]{2,1,0} dynamic-update-slice(%p.3, %p.4, %p.5)
}

%body (s: (s32[], bf16[4,128,128])) -> (s32[], bf16[4,128,128]) {
  %s = (s32[], bf16[4,128,128]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = bf16[4,128,128]{2,1,0} get-tuple-element(%s), index=1
  %fusion.1 = bf16[128,128]{1,0} fusion(%stack, %i), kind=kLoop, calls=%sliced, backend_config={"estimated_cycles":"10"}
  %fusion.2 = bf16[4,128,128]{2,1,0} fusion(%stack, %fusion.1, %i), kind=kLoop, calls=%updated
  ROOT %tuple.1 = (s32[], bf16[4,128,128]{2,1,0}) tuple(%i, %fusion.2)
}

ENTRY %main (a: (s32[], bf16[4,128,128])) -> (s32[], bf16[4,128,128]) {
  %a = (s32[], bf16[4,128,128]{2,1,0}) parameter(0)
  ROOT %while.1 = (s32[], bf16[4,128,128]{2,1,0}) while(%a), condition=%cond, body=%body
}
"""


def test_a_loop_counts_its_trips_and_one_slice_of_a_stack_at_each_access():
    chip, slice_bytes, index_bytes = CHIPS["v5e"], 128 * 128 * 2, 4
    assert cost_of(Module(LOOP), chip).cycles == 10, "libtpu states no trip count"
    cost = cost_of_loop(LOOP, 4, chip)
    assert cost.cycles == 40
    # A slice is read and its copy written; the copy is read and a slice written.
    assert cost.hbm_bytes == 4 * (4 * slice_bytes + 2 * index_bytes)
