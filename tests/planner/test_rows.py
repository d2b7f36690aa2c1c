"""The rows of a plan from a compiled report: what the report leaves out is added."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.hardware import CHIPS
from kp_dynamo.planner import planning
from kp_dynamo.planner.batches import Samples
from kp_dynamo.planner.bounds import MemoryBound, TimeBound
from kp_dynamo.planner.candidates import Candidate, Layout
from kp_dynamo.planner.compile_best import BestCompiler
from kp_dynamo.planner.request import Goal, PlanRequest, plan_request
from kp_dynamo.planner.rows import Figures, Outcome, RowMaker, figures_of, in_order
from kp_dynamo.planner.search import Bounded, Found
from kp_dynamo.planner.stored import StoredOutcomes
from tests.aot.test_report import PROGRAM, REPORT

STATE, GRADIENTS, OPTIMIZER_S = 2 * 10**9, 10**9, 0.5
LAYOUT = Layout(topology_of("v5e", 4), 4, 1, "fsdp")


def request(**options: object) -> PlanRequest:
    return plan_request(nn.Linear(8, 8), (torch.zeros(8, 8),), True, Goal(["v5e"]), options)


def figures(accumulate: int, report=REPORT, **options: object) -> Figures:
    is_added = accumulate > 1
    memory = MemoryBound(GRADIENTS, STATE, GRADIENTS, activations=0, inputs=0, is_added=is_added)
    time = TimeBound(1e-6, 0.0, 0.0, 0.0, 0.0, OPTIMIZER_S)
    bounded = Bounded(Candidate(LAYOUT, 2, accumulate, "off"), memory, time)
    return figures_of(bounded, Outcome(report), request(**options))


@pytest.mark.parametrize(("accumulate", "kept"), [(1, 0), (3, GRADIENTS)])
def test_the_optimizer_is_added_to_what_was_compiled(accumulate, kept):
    """From the second batch on, the gradients of those before are there beside the report's own."""
    found = figures(accumulate)
    assert found.kind == "compiled"
    assert found.memory_bytes == REPORT.step_peak_bytes + STATE + kept
    assert found.step_s == pytest.approx(accumulate * REPORT.step_ms / 1e3 + OPTIMIZER_S)


def test_parameters_that_no_program_reads_are_added_to_what_was_compiled():
    without, memory = figures(1), replace(figures(1).bounded.memory, unread=10**8)
    bounded = replace(without.bounded, memory=memory)
    assert figures_of(bounded, Outcome(REPORT), request()).memory_bytes == without.memory_bytes + 10**8


def test_a_step_that_fits_may_not_fit_with_the_state_of_the_optimizer():
    assert REPORT.step_peak_bytes < 1.5e9 < STATE
    found = figures(1, memory_budget_gb=1.5)
    assert found.kind == "failed"
    assert found.problem == "does not fit: 2.00 GB a chip, compiled and with the optimizer's state"


def test_a_late_way_rules_out_what_exceeds_its_bound_as_much(tmp_path):
    """Of its slice and sharding; other slices are tried."""
    asked = replace(request(), goal=LATE, samples=Samples(8, 1024, 0))
    late = figures_of(figures(1).bounded, Outcome(REPORT), asked)
    compiler = BestCompiler(asked, Found([]), StoredOutcomes(tmp_path, asked, {}), is_shown=False)
    compiler.figures[late.candidate] = late
    alike = replace(late.bounded, candidate=replace(late.candidate, samples=4))
    other = replace(alike, candidate=replace(alike.candidate, layout=Layout(topology_of("v5e", 8), 8, 1, "fsdp")))
    fast = replace(alike, time=TimeBound(1e-12, 0.0, 0.0, 0.0, 0.0, 0.0))
    assert [compiler._is_ruled_out(bounded) for bounded in (alike, other, fast)] == [True, False, False]


LATE = Goal(["v5e"], tokens=1e12, deadline_hours=1.0)


def test_a_way_whose_bound_meets_the_deadline_may_miss_it_once_compiled():
    asked = replace(request(), goal=LATE, samples=Samples(8, 1024, 0))
    bounded, outcome = figures(1).bounded, Outcome(REPORT)
    late = figures_of(bounded, outcome, asked)
    hours = 1e12 / (1024 * 8) * late.step_s / 3600
    assert (late.kind, late.problem) == ("late", f"misses the deadline: {hours:.3g} hours, compiled")
    assert figures_of(bounded, outcome, replace(asked, goal=replace(LATE, deadline_hours=2 * hours))).kind == "compiled"
    bound = figures_of(bounded, None, asked)
    assert in_order([late, bound], "cost") == [bound, late]
    row = RowMaker(asked, 1, bound).row(late)
    assert (row.why, row.is_compiled, row.hours) == (late.problem, True, pytest.approx(hours))


def test_the_best_row_is_shown_however_many_have_a_problem():
    compiled = figures(1)
    for num_good in (1, 3):
        for num_failed in (5, 10, 13):
            ordered = [compiled] * num_good + [replace(compiled, kind="failed", problem="does not fit")] * num_failed
            shown = planning._shown(ordered)
            assert (shown[0], len(shown)) == (compiled, min(planning.NUM_ROWS, num_good + num_failed))


def test_the_mfu_of_a_compiled_row_counts_the_flops_of_the_model():
    """Not those of the report's programs, which hold the recomputed ones."""
    flops = 10**12
    recomputing = replace(REPORT, programs=(replace(PROGRAM, recomputed_flops=PROGRAM.model_flops // 2),))
    for report in (REPORT, recomputing):
        found = figures(1, report)
        row = RowMaker(request(), flops, found).row(found)
        assert row.mfu == pytest.approx(flops * 8 / found.step_s / (4 * CHIPS["v5e"].bf16_flops))


def bounded(matmuls: float, **sums: float) -> Bounded:
    none = dict.fromkeys(("traffic", "gathers", "gradient_sums", "result_sums", "optimizer"), 0.0)
    memory = MemoryBound(GRADIENTS, STATE, GRADIENTS, activations=0, inputs=0, is_added=False)
    return Bounded(Candidate(LAYOUT, 2, 1, "off"), memory, TimeBound(matmuls, **{**none, **sums}))


def test_what_sums_much_comes_after_what_computes_a_little_more():
    """The programs of libtpu 0.0.21 hide gathers behind matmuls, and no sums."""
    much = bounded(1.0, result_sums=0.9)
    little = bounded(1.2, gathers=0.9)
    assert much.value("time") < little.value("time")
    assert sorted((much, little), key=lambda b: b.rank("time")) == [little, much]
    first, second = (figures_of(b, None, request()) for b in (little, much))
    assert RowMaker(request(), 1, first).row(second).why == (
        "at least 0.83x the cost of the first, but 1.58x if nothing overlaps with sums"
    )


def test_a_row_with_sums_says_what_they_may_cost():
    first = figures(1)
    step = REPORT.step_ms / 1e3 + OPTIMIZER_S
    other = figures_of(bounded(step / 2, gradient_sums=step / 4), None, request())
    assert RowMaker(request(), 1, first).row(other).why == (
        "not compiled: its cost is at least 0.50x that of the first, or 0.75x if nothing overlaps with its sums, "
        "so it may be better"
    )
