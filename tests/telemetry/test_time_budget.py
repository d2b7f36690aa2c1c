"""The soft budget of a compilation: foretold, watched with a stack, raised at the end, and nothing compiled is lost."""

import logging
import threading
import time

import pytest
import torch

from kp_dynamo import XLACompilationTimeoutError, clear_cache
from kp_dynamo.lowering.openxla import OpenXla
from kp_dynamo.telemetry import TELEMETRY
from kp_dynamo.telemetry.time_budget import estimate_compile_s, time_budget
from tests.spine import compiled, counted


@pytest.fixture
def slow_xla(monkeypatch):
    """Every program takes 1.2 s more: long beside the budgets here, which are long beside what else is done."""
    compile_of = OpenXla.compile

    def slow(*args):
        time.sleep(1.2)
        return compile_of(*args)

    clear_cache()
    monkeypatch.setattr(OpenXla, "compile", slow)


def raised_by(call):
    with pytest.raises((torch._dynamo.exc.BackendCompilerFailed, XLACompilationTimeoutError)) as raised:
        call()
    return getattr(raised.value, "inner_exception", raised.value)


def test_a_block_within_its_budget_is_left_alone(caplog):
    for seconds in (60.0, None):
        with time_budget(seconds, "it"):
            pass
    assert caplog.records == []
    assert threading.active_count() < 50


def a_slow_function():
    time.sleep(0.2)


def under_a_budget(seconds, *steps):
    with time_budget(seconds, "it"):
        for step in steps:
            step()


def test_a_block_over_its_budget_warns_with_its_stack_and_raises_at_its_end(caplog):
    done = []
    message = r"compiling it took \d+\.\d s, longer than compile_timeout_s=0\.02 allows"
    with pytest.raises(XLACompilationTimeoutError, match=message):
        under_a_budget(0.02, a_slow_function, lambda: done.append(True))
    assert done == [True], "nothing is interrupted"
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "compiling it takes longer than compile_timeout_s=0.02" in warning
    assert "in a_slow_function\n    time.sleep(0.2)" in warning


def test_one_budget_inside_another_is_part_of_it():
    with time_budget(60.0, "the whole"), time_budget(0.001, "a part"):
        time.sleep(0.01)


def test_an_error_of_the_block_comes_through_and_ends_its_budget():
    with pytest.raises(ZeroDivisionError):
        under_a_budget(0.001, a_slow_function, lambda: 1 / 0)
    with pytest.raises(XLACompilationTimeoutError):
        under_a_budget(0.001, a_slow_function)


def test_a_compilation_over_its_budget_is_kept(slow_xla):
    run = compiled(lambda x: x * 2 + 1, compile_timeout_s=1.0)
    with counted() as counts:
        error = raised_by(lambda: run(torch.ones(3)))
    assert isinstance(error, XLACompilationTimeoutError)
    assert "compiling capture" in str(error)
    assert counts.programs == 1
    torch._dynamo.reset()
    with counted() as counts:
        assert run(torch.ones(3)).tolist() == [3, 3, 3]
    assert (counts.programs, counts.hits) == (0, 1)


def test_a_program_for_another_shape_is_kept_too(slow_xla, monkeypatch):
    run = compiled(lambda x: x * 2 + 1, dynamic=True, compile_timeout_s=1.0)
    error = raised_by(lambda: run(torch.ones(3)))
    assert ".inference took" in str(error)
    assert run(torch.ones(3)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("options", [{}, {"compile_timeout_s": None}, {"compile_timeout_s": 60}])
def test_without_a_budget_or_with_a_long_one_it_compiles(slow_xla, options):
    assert compiled(lambda x: x * 2 + 1, **options)(torch.ones(1)).item() == 3


def test_the_budget_is_not_in_the_key(slow_xla):
    run = compiled(lambda x: x * 2 + 1)
    run(torch.ones(3))
    torch._dynamo.reset()
    with counted() as counts:
        compiled(lambda x: x * 2 + 1, compile_timeout_s=1.0)(torch.ones(3))
    assert counts.programs == 0


@pytest.fixture
def history(monkeypatch):
    """10 operators took 2 s so far."""
    monkeypatch.setitem(TELEMETRY.counts, "operators_compiled", 10)
    monkeypatch.setitem(TELEMETRY.seconds, "trace", 0.5)
    monkeypatch.setitem(TELEMETRY.seconds, "xla", 1.5)


def test_the_time_of_a_graph_is_estimated_from_earlier_compilations(history, caplog):
    assert estimate_compile_s(100, "1.forward", 60) == pytest.approx(20)
    assert estimate_compile_s(100, "1.forward", None) == pytest.approx(20)
    assert caplog.records == []
    estimate_compile_s(1000, "1.forward", 60)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("compiling 1.forward, 1000 operators, is expected to take 200.0 s")


def test_the_first_graph_has_no_estimate(monkeypatch):
    monkeypatch.setitem(TELEMETRY.counts, "operators_compiled", 0)
    assert estimate_compile_s(1000, "1.forward", 1) is None


def test_operators_are_counted():
    clear_cache()
    before = TELEMETRY.counts["operators_compiled"]
    compiled(lambda x: torch.sin(x) * 2)(torch.ones(1))
    assert TELEMETRY.counts["operators_compiled"] - before == 2
