"""Threads that compile, call, read and synchronise at once."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
from torch._dynamo.backends import registry
from torch.fx import _symbolic_trace

from kp_dynamo.backend import kp_tpu
from kp_dynamo.compat.lock import one_trace_at_a_time
from kp_dynamo.lowering.fallback import NeedsValue, values_forbidden
from tests.spine import compiled

entered, go_on = threading.Event(), threading.Event()


@torch.library.custom_op("kp_tests::slow_to_trace", mutates_args=())
def slow_to_trace(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@slow_to_trace.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if _symbolic_trace._is_fx_tracing_flag:  # AOTAutograd traces; before it, Dynamo has
        entered.set()
        assert go_on.wait(60)
    return torch.empty_like(x)


def test_a_thread_calls_while_another_one_traces():
    x = torch.ones(3)
    known, other = compiled(lambda x: x * 2), torch.compile(lambda x: x * 3, backend="aot_eager")
    known(x), other(x)
    entered.clear(), go_on.clear()
    tracing = threading.Thread(target=compiled(slow_to_trace), args=(x,))
    tracing.start()
    try:
        assert entered.wait(60)
        assert known(x).tolist() == [2, 2, 2]
        assert other(x).tolist() == [3, 3, 3]
    finally:
        go_on.set()
        tracing.join(60)


def test_a_compiled_function_inside_a_trace_is_still_refused():
    known = compiled(lambda x: x * 2)
    with pytest.raises(RuntimeError, match="using FX to symbolically trace"):
        torch.fx.symbolic_trace(lambda x: known(x))
    assert not _symbolic_trace.is_fx_symbolic_tracing()


def test_a_backend_may_be_registered_by_two_threads():
    assert registry.register_backend(kp_tpu, "kp_tpu") is kp_tpu
    with pytest.raises(AssertionError, match="duplicate name: kp_tpu"):
        registry.register_backend(lambda gm, inputs: gm, "kp_tpu")


def test_reading_a_value_enters_no_python():
    # With the GIL, a thread that reads a tensor and one that compiles wait for each other: torch_xla has a lock too.
    compiled(torch.linalg.eigvals)(torch.eye(2))  # finds out that the CPU is needed
    x, called = torch.ones(2, device=torch_xla.device()), []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        x.sum().item(), x.nonzero()
    finally:
        sys.setprofile(None)
    assert not called


def test_values_are_forbidden_in_the_thread_that_traces_alone():
    x = torch.ones(2, device=torch_xla.device())
    with values_forbidden():
        with values_forbidden(), pytest.raises(NeedsValue):
            x.sum().item()
        with pytest.raises(NeedsValue):
            x.sum().item()
        assert torch.tensor(3).item() == 3
        with ThreadPoolExecutor(1) as other:
            assert other.submit(x.sum().item).result(60) == 2
    assert x.sum().item() == 2


def test_a_thread_that_synchronises_waits_for_one_that_traces():
    with ThreadPoolExecutor(1) as other:
        with one_trace_at_a_time():
            syncing = other.submit(torch_xla.sync)
            with pytest.raises(TimeoutError):
                syncing.result(0.1)
        syncing.result(60)


# torch_xla ends the process where a placeholder is synchronised.
SYNC_IN_A_TRACE = """
import threading, torch, torch_xla
entered, go_on = threading.Event(), threading.Event()

@torch.library.custom_op("kp_tests::slow_to_lower", mutates_args=(), device_types="cpu")
def slow_to_lower(x: torch.Tensor) -> torch.Tensor:
    return x + 1

@slow_to_lower.register_kernel("xla")
def lowered(x):
    entered.set()
    assert go_on.wait(60)
    return x + 1

slow_to_lower.register_fake(torch.empty_like)
x = torch.ones(3, device="xla")
torch_xla.sync()
run = torch.compile(lambda x: slow_to_lower(x) * 2, backend="kp_tpu")
tracing = threading.Thread(target=run, args=(x,))
tracing.start()
assert entered.wait(60)
syncing = threading.Thread(target=torch_xla.sync)
syncing.start()
syncing.join(0.2)
assert syncing.is_alive()
go_on.set()
tracing.join(60), syncing.join(60)
assert run(x).tolist() == [4, 4, 4]
"""


@pytest.mark.slow  # a process of its own
def test_no_placeholder_is_synchronised():
    done = subprocess.run([sys.executable, "-c", SYNC_IN_A_TRACE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
