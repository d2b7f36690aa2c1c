"""`watch`: it warns of hangs and slow steps with step, host, program and line, and leaves no thread."""

import logging
import os
import re
import socket
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kp_dynamo
from kp_dynamo import TPUConfigurationError
from kp_dynamo.lowering.openxla import OpenXla
from kp_dynamo.telemetry import optimizer_steps, program_calls
from kp_dynamo.telemetry.call_record import CallRecord
from tests.spine import compiled


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "kp_tpu watch"]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert threads() == []
    assert program_calls.observers == ()
    assert optimizer_steps._observers == ()


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "kp_dynamo")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "kp_dynamo.telemetry.watching"]


@pytest.fixture
def record():
    """What a watch would know, without its thread."""
    found = CallRecord(2.0)
    program_calls.add(found)
    optimizer_steps.tell(found)
    yield found
    program_calls.remove(found)
    optimizer_steps.tell_no_more(found)


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def a_loop_that_stops(warnings, count):
    wait_for(lambda: len(warnings()) >= count)


def test_no_program_ends_at_all(warnings):
    with kp_dynamo.watch(hang_s=0.2, slow=None):
        a_loop_that_stops(warnings, 2)
    message = warnings()[0]
    assert re.match(r"no program ended for 0\.\d s in step 1 on host ", message)
    assert f"on host {socket.gethostname()} (process {os.getpid()})" in message
    assert "Last program: none since the watch began. Now: no program runs." in message
    assert f"At {__file__}:" in message
    assert "in wait_for: " in message
    assert "in a_loop_that_stops" in message, "the whole stack follows"


@pytest.fixture
def blocked(monkeypatch):
    """While it is set, a program of the backend does not end."""
    hold, compile_of = threading.Event(), OpenXla.compile

    def blocking(*args):
        executable = compile_of(*args)
        run = executable.run

        def run_when_released(values):
            wait_for(lambda: not hold.is_set())
            return run(values)

        object.__setattr__(executable, "run", run_when_released)
        return executable

    kp_dynamo.clear_cache()
    monkeypatch.setattr(OpenXla, "compile", blocking)
    yield hold
    kp_dynamo.clear_cache()


def test_a_program_that_hangs_is_named_with_the_one_before_it(warnings, blocked):
    run, x = compiled(lambda x: x.sin() * 3), torch.ones(3)
    with kp_dynamo.watch(hang_s=0.3, slow=None):
        run(x)
        before = len(warnings())  # the compilation may take longer than 0.3 s
        blocked.set()
        thread = threading.Thread(target=lambda: (wait_for(lambda: len(warnings()) > before + 1), blocked.clear()))
        thread.start()
        run(x)  # this line
        thread.join()
    message = warnings()[before + 1]
    assert re.search(
        r"Last program: (\d+\.inference), whose call returned then\. Now: \1 runs since \d+\.\d s", message
    )


def test_a_compilation_is_named(warnings, monkeypatch):
    compile_of = OpenXla.compile

    def slow(*args):
        a_loop_that_stops(warnings, 1)
        return compile_of(*args)

    kp_dynamo.clear_cache()
    monkeypatch.setattr(OpenXla, "compile", slow)
    run = compiled(lambda x: x.cos() * 5)
    with kp_dynamo.watch(hang_s=1.0, slow=None):
        run(torch.ones(3))
    assert re.search(r"Now: the compilation of \d+\.inference runs since", "".join(warnings()))


def test_programs_that_end_are_no_hang(warnings):
    run, x = compiled(lambda x: x.sin() * 7), torch.ones(3)
    run(x)
    with kp_dynamo.watch(hang_s=2.0, slow=None):
        for _ in range(30):
            run(x)
            time.sleep(0.1)
    assert warnings() == []


def a_model():
    model = torch.nn.Linear(4, 4)
    return model, compiled(model), torch.ones(2, 4)


def test_a_slow_step_of_an_optimizer_names_the_line_where_it_waited(warnings):
    model, run, x = a_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with kp_dynamo.watch(hang_s=None, slow=2.0):
        for number in range(20):
            run(x).sum().backward()
            if number == 19:
                time.sleep(3)  # loads data
            optimizer.step()
    (message,) = [m for m in warnings() if m.startswith("step 20 ")]
    assert re.match(
        r"step 20 \(SGD\.step\) took [3-9][.\d]* s, [\d.]+ times the median of [\de.-]+ s, on host", message
    )
    assert re.search(r"Last program: \d+\.backward\. At ", message)
    assert f"{__file__}:" in message
    assert "time.sleep(3)  # loads data" in message


def test_without_an_optimizer_a_step_is_a_backward(record):
    _, run, x = a_model()
    for _ in range(4):
        run(x).sum().backward()
    run(x)
    (steps,) = record.all_steps()
    assert (steps.kind, steps.number) == ("backward", 4)


def test_checkpointed_code_that_runs_backwards_in_a_backward_is_one_step(record):
    first, second = a_model()[1], a_model()[1]
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        loss = checkpoint(second, checkpoint(first, x, use_reentrant=True), use_reentrant=True).sum()
        loss.backward()
    first(x)
    assert record.num_steps() == 3


def test_accumulated_gradients_are_one_step_and_each_optimizer_has_its_own(record):
    model, run, x = a_model()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())]
    for _ in range(3):
        for _ in range(2):
            run(x).sum().backward()
        optimizers[0].step()
    optimizers[1].step()
    assert sorted((steps.kind, steps.number) for steps in record.all_steps()) == [("Adam.step", 1), ("SGD.step", 3)]


def test_an_optimizer_that_is_gone_is_forgotten(record):
    model = torch.nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert record.all_steps()[0].kind == "backward"


def test_a_compiled_optimizer_is_seen_and_not_compiled_again_for_a_watch(record):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = compiled(lambda: optimizer.step())
    model(torch.ones(1, 2)).sum().backward()
    step()
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        with kp_dynamo.watch(hang_s=None, slow=2.0):
            step()
    assert torch._dynamo.utils.counters["frames"] == {}
    assert record.num_steps() == 4


def test_programs_of_another_thread_are_seen(record):
    run = compiled(lambda x: x * 2)
    thread = threading.Thread(target=lambda: run(torch.ones(3)))
    thread.start()
    thread.join()
    assert record.last_program.endswith(".inference")
    assert record.running(0.0) == "no program runs"


def test_a_hang_after_a_thread_that_ended_shows_the_one_of_the_block(warnings):
    run = compiled(lambda x: x * 11)
    with kp_dynamo.watch(hang_s=0.2, slow=None):
        thread = threading.Thread(target=lambda: run(torch.ones(3)))
        thread.start()
        thread.join()
        a_loop_that_stops(warnings, len(warnings()) + 2)
    assert "in a_loop_that_stops" in warnings()[-1]


def test_a_program_that_raises_does_not_run_forever(record, monkeypatch):
    run = compiled(lambda x: x * 9)
    run(torch.ones(3))

    def failing(*_):
        raise RuntimeError("lost the device")

    monkeypatch.setattr("kp_dynamo.runtime.compiled_graph.CompiledGraph._run", failing)
    with pytest.raises(RuntimeError, match="lost the device"):
        run(torch.ones(3))
    assert record.running(0.0) == "no program runs"


def test_watches_nest_repeat_and_end_by_an_exception():
    watch = kp_dynamo.watch(hang_s=50)
    for _ in range(2):
        with watch as outer, watch, kp_dynamo.watch(slow=3):
            assert outer is watch
            assert len(threads()) == len(program_calls.observers) == 3
        assert threads() == []
    with pytest.raises(ValueError, match="mine"), watch:
        raise ValueError("mine")


def test_a_process_may_end_inside_the_block():
    from tests.spine import run_script

    script = "import sys, kp_dynamo\nkp_dynamo.watch().__enter__()\nprint('ended')\nsys.exit(0)"
    assert "ended" in run_script(script)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "300"])
def test_a_bad_hang_s_raises(value):
    with pytest.raises(TPUConfigurationError, match=r"hang_s=.* is invalid\. Allowed: a positive number"):
        kp_dynamo.watch(hang_s=value)


@pytest.mark.parametrize("value", [1, 0.5, float("nan"), False, "2"])
def test_a_bad_factor_raises(value):
    with pytest.raises(TPUConfigurationError, match=r"slow=.* is invalid\. Allowed: a number above 1"):
        kp_dynamo.watch(slow=value)


def test_nothing_to_watch_raises():
    with pytest.raises(TPUConfigurationError, match="nothing is watched"):
        kp_dynamo.watch(hang_s=None, slow=None)
