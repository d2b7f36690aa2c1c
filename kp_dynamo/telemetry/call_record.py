"""What a watch knows: the programs that run, the last one that returned, and the times of the steps."""

from __future__ import annotations

import threading
import time
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import Optimizer

from kp_dynamo.telemetry.step_times import SlowStep, StepTimes

_backward_now = torch._C._current_graph_task_id  # -1 outside a backward: torch has no public name for it


class CallRecord:
    """Filled by the threads of the user, read by the thread of a watch.

    A step ends with the step of an optimizer. Until an optimizer was seen, it ends with a backward: the last program of
    a backward that is followed by a program outside of one. The end of a backward is not asked of autograd, because
    checkpointed code runs backwards inside a backward.

    Args:
        slow: How many times the median a step must exceed to be slow; None if none is.
    """

    def __init__(self, slow: float | None) -> None:
        self.wake = threading.Event()
        self.user_thread = threading.get_ident()
        self.last_program, self.last_end = "", time.monotonic()
        self._slow = slow
        self._lock = threading.RLock()  # a signal handler may call a program in the middle of a step's end
        self._running: dict[int, tuple[str, float]] = {}
        self._backward_end: float | None = None
        self._num_compiled = 0
        self._backwards = StepTimes("backward", slow)
        self._optimizers: WeakKeyDictionary[Optimizer, StepTimes] = WeakKeyDictionary()
        self._slow_steps: list[SlowStep] = []

    def called(self, graph: str) -> None:
        now = time.monotonic()
        if not graph.endswith(".backward") and _backward_now() == -1:
            self.user_thread = threading.get_ident()
            if self._backward_end is not None:
                self._end_backward()
        self._running[threading.get_ident()] = graph, now

    def returned(self, graph: str) -> None:
        self._running.pop(threading.get_ident(), None)
        self.last_program, self.last_end = graph, time.monotonic()
        if graph.endswith(".backward"):
            self._backward_end = self.last_end

    def compiles(self, graph: str) -> None:
        if not graph.endswith(".backward") and _backward_now() == -1:
            self.user_thread = threading.get_ident()
        self._running[threading.get_ident()] = f"the compilation of {graph}", time.monotonic()

    def compiled(self, graph: str) -> None:
        self._num_compiled += 1
        self._running.pop(threading.get_ident(), None)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        self.user_thread = threading.get_ident()
        with self._lock:
            steps = self._optimizers.get(optimizer)
            if steps is None:
                steps = self._optimizers[optimizer] = StepTimes(f"{type(optimizer).__name__}.step", self._slow)
            self._end_step(steps, time.monotonic())

    def _end_backward(self) -> None:
        with self._lock:
            ended, self._backward_end = self._backward_end, None
            if ended is not None and not self._optimizers:
                self._end_step(self._backwards, ended)

    def _end_step(self, steps: StepTimes, now: float) -> None:
        had_deadline = steps.deadline is not None
        found = steps.ended(now, self.last_program, self._num_compiled)
        if found is not None:
            self._slow_steps.append(found)
        if found is not None or (steps.deadline is not None and not had_deadline):
            self.wake.set()  # the thread may wait for something later

    def take_slow_steps(self) -> list[SlowStep]:
        """The slow steps since the last call."""
        with self._lock:
            found, self._slow_steps = self._slow_steps, []
        return found

    def all_steps(self) -> list[StepTimes]:
        """One for each optimizer, or that of the backwards."""
        with self._lock:
            return list(self._optimizers.values()) or [self._backwards]

    def num_steps(self) -> int:
        """The steps that ended."""
        return max(steps.number for steps in self.all_steps())

    def running(self, now: float) -> str:
        """What is running, for a message."""
        found = [f"{what} runs since {now - since:.1f} s" for what, since in self._running.copy().values()]
        return ", ".join(found) or "no program runs"
