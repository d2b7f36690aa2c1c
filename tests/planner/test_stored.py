"""Results of the compiler as files: an interrupted search goes on where it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.compat import own_source
from kp_dynamo.exceptions import TPUConfigurationError, XLACompilationError
from kp_dynamo.planner import compile_best, planning
from kp_dynamo.planner.bounds import MemoryBound, TimeBound
from kp_dynamo.planner.candidates import Candidate, Layout
from kp_dynamo.planner.compile_best import BestCompiler
from kp_dynamo.planner.planning import plan
from kp_dynamo.planner.request import Goal, plan_request
from kp_dynamo.planner.rows import Outcome
from kp_dynamo.planner.search import Bounded, Found
from kp_dynamo.planner.stored import StoredOutcomes
from tests.aot.test_report import REPORT

CANDIDATE = Candidate(Layout(topology_of("v5e", 4), 4, 1, "fsdp"), 2, 1, "off")
PROBLEM = Outcome(problem="does not fit: 17.00 GB", is_too_large=True)


def request_and_files(folder, graphs="a", **options):
    request = plan_request(nn.Linear(8, 8), (torch.zeros(8, 8),), True, Goal(["v5e"]), options)
    return request, StoredOutcomes(folder, request, {"off": graphs})


def bounded(candidate):
    return Bounded(candidate, MemoryBound(1, 2, 1, 0, 0, is_added=False), TimeBound(1.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def test_an_outcome_is_read_again(tmp_path):
    _, files = request_and_files(tmp_path / "new" / "folder")
    assert files.read(CANDIDATE) is None
    files.write(CANDIDATE, PROBLEM)
    assert files.read(CANDIDATE) == PROBLEM
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]


def test_another_candidate_model_or_option_has_another_file(tmp_path):
    request_and_files(tmp_path)[1].write(CANDIDATE, PROBLEM)
    assert request_and_files(tmp_path)[1].read(replace(CANDIDATE, samples=4)) is None
    assert request_and_files(tmp_path, graphs="b")[1].read(CANDIDATE) is None
    assert request_and_files(tmp_path, level="aggressive")[1].read(CANDIDATE) is None
    # A batch is compiled once, whatever the number of batches of a step.
    assert request_and_files(tmp_path)[1].read(replace(CANDIDATE, accumulate=8)) == PROBLEM


def test_other_flags_of_libtpu_have_another_file(tmp_path, monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    _, files = request_and_files(tmp_path)
    files.write(CANDIDATE, PROBLEM)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
    assert files.read(CANDIDATE) is None
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " ")
    assert files.read(CANDIDATE) == PROBLEM


def test_another_plan_of_the_model_or_source_has_another_file(tmp_path):
    request, files = request_and_files(tmp_path)
    divided = replace(CANDIDATE, layout=Layout(topology_of("v5e", 4), 1, 4, "tensor"))
    for candidate in (CANDIDATE, divided):
        files.write(candidate, PROBLEM)
    request.model._tp_plan = {"0": "colwise"}
    assert files.read(divided) is None
    assert files.read(CANDIDATE) == PROBLEM  # "fsdp" does not read it
    assert replace(files, source="another").read(CANDIDATE) is None


def test_nothing_is_kept_if_the_source_changed_meanwhile(tmp_path, monkeypatch):
    _, files = request_and_files(tmp_path)
    monkeypatch.setattr(own_source, "IMPORTED_AT", 0.0)
    files.write(CANDIDATE, PROBLEM)
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_counts_as_none(tmp_path):
    _, files = request_and_files(tmp_path)
    files.write(CANDIDATE, PROBLEM)
    [path] = tmp_path.iterdir()
    path.write_text(path.read_text()[:10])
    assert files.read(CANDIDATE) is None


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TPUConfigurationError, match="cannot be written"):
        request_and_files(tmp_path / "file")[1].write(CANDIDATE, PROBLEM)


def test_a_failure_on_file_is_not_compiled_again_and_rules_out_larger_batches(tmp_path):
    request, files = request_and_files(tmp_path)
    files.write(CANDIDATE, PROBLEM)
    larger = replace(CANDIDATE, samples=4)
    compiler = BestCompiler(request, Found([bounded(CANDIDATE), bounded(larger)]), files, is_shown=False)
    compiler.compile(1)
    [figures] = compiler.tried_and_left()
    assert (figures.kind, figures.problem) == ("failed", PROBLEM.problem)


def test_what_the_compiler_refuses_for_another_reason_rules_out_only_itself(tmp_path, monkeypatch):
    request, files = request_and_files(tmp_path)
    refused = Outcome(problem="does not compile: exceeded its time limit")
    monkeypatch.setattr(compile_best, "_outcome", lambda candidate, request: (refused, False))
    both = [bounded(CANDIDATE), bounded(replace(CANDIDATE, samples=4))]
    compiler = BestCompiler(request, Found(both), files, is_shown=False)
    compiler.compile(1)
    tried = compiler.tried_and_left()
    assert [f.candidate for f in tried] == [b.candidate for b in both]
    problem = planning._nothing_compiled(tried)
    assert type(problem) is XLACompilationError
    assert "exceeded its time limit" in str(problem)


def test_other_slices_are_tried_after_what_the_compiler_refused(tmp_path, monkeypatch):
    request, files = request_and_files(tmp_path)
    refused = Outcome(problem="does not compile: exceeded its time limit")
    monkeypatch.setattr(compile_best, "_outcome", lambda candidate, request: (refused, False))
    other = Candidate(Layout(topology_of("v5e", 8), 8, 1, "fsdp"), 2, 1, "off")
    all_ways = [bounded(replace(CANDIDATE, samples=samples)) for samples in (2, 4, 8, 16, 32)] + [bounded(other)]
    compiler = BestCompiler(request, Found(all_ways), files, is_shown=False)
    compiler.compile(1)
    assert list(compiler.figures)[1] == other


def test_what_leaves_room_for_temporaries_is_compiled_first(tmp_path):
    request, files = request_and_files(tmp_path)
    tight = Candidate(Layout(topology_of("v5e", 8), 8, 1, "fsdp"), 8, 1, "off")
    for candidate in (CANDIDATE, tight):
        files.write(candidate, PROBLEM)
    full = MemoryBound(int(0.9 * request.budgets["v5e"]), 0, 0, 0, 0, is_added=False)
    fitting = [replace(bounded(tight), memory=full), bounded(CANDIDATE)]  # the best first
    compiler = BestCompiler(request, Found(fitting), files, is_shown=False)
    compiler.compile(1)
    assert [f.candidate for f in compiler.tried_and_left()] == [CANDIDATE, tight]


def test_what_a_compiled_way_needs_beyond_its_bound_is_expected_of_its_kind(tmp_path):
    """Twice the samples need twice the temporaries; another axis "model" has other programs."""
    request, files = request_and_files(tmp_path, memory_budget_gb=1.5 * REPORT.step_peak_bytes / 1e9)
    larger = Candidate(Layout(topology_of("v5e", 8), 8, 1, "fsdp"), 4, 1, "off")
    other_kind = replace(larger, layout=Layout(topology_of("v5e", 16), 8, 2, "fsdp+tensor"))
    for candidate in (CANDIDATE, larger, other_kind):
        files.write(candidate, Outcome(REPORT))
    ranked = []
    for place, candidate in enumerate((CANDIDATE, larger, other_kind), 1):
        seconds = place * candidate.step_samples / candidate.layout.topology.num_chips
        ranked.append(replace(bounded(candidate), time=TimeBound(seconds, 0.0, 0.0, 0.0, 0.0, 0.0)))
    compiler = BestCompiler(request, Found(ranked), files, is_shown=False)
    compiler.compile(2)
    assert list(compiler.figures) == [CANDIDATE, other_kind]
    compiler.compile(3)
    assert list(compiler.figures) == [CANDIDATE, other_kind, larger]


@pytest.mark.slow
def test_the_best_is_compiled_once_and_then_read(tmp_path):
    with torch.device("meta"):
        model, args = nn.Linear(512, 512), (torch.zeros(512, 512),)
    arguments = {"targets": ["v5e"], "max_chips": 1, "num_compiled": 1, "folder": tmp_path}
    first = plan(model, args, **arguments)
    assert first.winner.kind == "compiled"
    assert first.winner.why == "the winner"
    bounds = plan(model, args, **{**arguments, "num_compiled": 0}).winner
    assert first.winner.step_ms >= bounds.step_ms
    assert first.winner.memory_bytes >= bounds.memory_bytes
    again = plan(model, args, **arguments)
    assert again.rows == first.rows
    assert again.seconds["compile"] < first.seconds["compile"] / 3  # read, not compiled


@pytest.mark.slow
def test_an_interrupted_plan_compiles_only_what_is_missing(tmp_path, monkeypatch):
    """Ctrl-C in the second of two compiles; the next run compiles that one alone."""
    with torch.device("meta"):
        model, args = nn.Linear(512, 512), (torch.zeros(512, 512),)
    compiled: list[str] = []

    def interrupted(*args, target, **given):
        if compiled:
            raise KeyboardInterrupt
        compiled.append(target)
        return aot_compile(*args, target=target, **given)

    def counted(*args, target, **given):
        compiled.append(target)
        return aot_compile(*args, target=target, **given)

    arguments = {"targets": ["v5e", "v6e"], "max_chips": 1, "num_compiled": 2, "folder": tmp_path}
    monkeypatch.setattr(compile_best, "aot_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan(model, args, **arguments)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(compile_best, "aot_compile", counted)
    found = plan(model, args, **arguments)
    assert sorted(compiled) == ["v5e", "v6e"]
    assert [row.kind for row in found.rows] == ["compiled", "compiled"]
    assert len(list(tmp_path.iterdir())) == 2
