"""`watch`: a thread that warns when no program ends for long, or when a step takes longer than usual."""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from types import TracebackType

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.telemetry import optimizer_steps, program_calls
from kp_dynamo.telemetry.call_record import CallRecord
from kp_dynamo.telemetry.counters import TELEMETRY
from kp_dynamo.telemetry.step_times import SlowStep
from kp_dynamo.telemetry.user_frames import frame_of, stack_text, user_frame, user_line

logger = logging.getLogger(__name__)

_SHORTEST_WAIT_S = 0.05  # the thread takes some 50 us each time it looks
_BETWEEN_WARNINGS_S = 10.0  # of slow steps: steps of milliseconds would fill the log


class Watch:
    """What `watch` returns. Each `with` starts a thread of its own, so one object can be entered again."""

    def __init__(self, hang_s: float | None, slow: float | None) -> None:
        self._hang_s, self._slow = hang_s, slow
        self._entered: list[_Watcher] = []

    def __enter__(self) -> Watch:
        watcher = _Watcher(self._hang_s, self._slow)
        watcher.start()
        self._entered.append(watcher)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered.pop().stop()


def watch(hang_s: float | None = 300, slow: float | None = 2.0) -> Watch:
    """Warn, in a `with` block, of programs that hang and of slow steps.

    A thread logs a warning each time no program has ended for `hang_s`, and one for a step that took over `slow` times
    the median of the last 50. docs/watching.md says what counts as a step, and what the warnings name. The block itself
    is never interrupted, and nothing is raised in it.

    Args:
        hang_s: Seconds; None for no such warning.
        slow: A factor above 1; None for no such warning.

    Raises:
        TPUConfigurationError: An argument is invalid, or both are None.
    """
    _check("hang_s", hang_s, 0, "a positive number of seconds, or None", "hang_s=300")
    _check("slow", slow, 1, "a number above 1, or None", "slow=2.0")
    if hang_s is None and slow is None:
        raise TPUConfigurationError("hang_s=None, slow=None is invalid: nothing is watched. Try: hang_s=300.")
    return Watch(hang_s, slow)


def _check(name: str, value: object, above: float, allowed: str, example: str) -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= above:  # type: ignore[arg-type, operator]
        raise TPUConfigurationError(f"{name}={value!r} is invalid. Allowed: {allowed}. Try: {example}.")


class _Watcher:
    """The thread of one `with` block."""

    def __init__(self, hang_s: float | None, slow: float | None) -> None:
        self._hang_s, self._slow = hang_s, slow
        self._record = CallRecord(slow)
        self._entered_by = threading.get_ident()
        self._is_stopped = False
        self._warned_hang = self._warned_slow = -math.inf
        # A daemon: a process that ends inside the block does not wait for it.
        self._thread = threading.Thread(target=self._run, name="kp_tpu watch", daemon=True)

    def start(self) -> None:
        optimizer_steps.tell(self._record)
        program_calls.add(self._record)
        self._thread.start()

    def stop(self) -> None:
        program_calls.remove(self._record)
        optimizer_steps.tell_no_more(self._record)
        self._is_stopped = True
        self._record.wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._record.wake.wait(self._wait_s(time.monotonic()))
                self._record.wake.clear()
                self._look(time.monotonic())
            self._warn_of_slow_steps(time.monotonic())
        except Exception:
            logger.exception("the watch ended: its thread failed. The program that it watched goes on")

    def _wait_s(self, now: float) -> float:
        deadlines = [d for steps in self._record.all_steps() if (d := steps.deadline) is not None]
        if self._hang_s is not None:
            deadlines.append(self._quiet_since() + self._hang_s)
        deadlines.append(now + _BETWEEN_WARNINGS_S)  # slow steps may wait for their warning
        return max(min(deadlines) - now, _SHORTEST_WAIT_S)

    def _look(self, now: float) -> None:
        for steps in self._record.all_steps():
            steps.look(now)
        if self._hang_s is not None and now - self._quiet_since() >= self._hang_s:
            self._warn_of_hang(now)
            self._warned_hang = now
        if now - self._warned_slow >= _BETWEEN_WARNINGS_S:
            self._warn_of_slow_steps(now)

    def _quiet_since(self) -> float:
        return max(self._record.last_end, self._warned_hang)

    def _warn_of_hang(self, now: float) -> None:
        record = self._record
        TELEMETRY.count("hang_warnings")
        quiet_s, program = now - record.last_end, record.last_program
        thread = record.user_thread if frame_of(record.user_thread) is not None else self._entered_by
        line = user_line(user_frame(frame_of(thread)))
        logger.warning(
            "no program ended for %.1f s in step %d on host %s (process %d). Last program: %s. Now: %s. At %s\nStack "
            "(frames of torch left out):\n%s",
            quiet_s,
            record.num_steps() + 1,
            socket.gethostname(),
            os.getpid(),
            f"{program}, whose call returned then" if program else "none since the watch began",
            record.running(now),
            line,
            stack_text(thread),
            extra={"event": "hang", "seconds": quiet_s, "program": program, "line": line},
        )

    def _warn_of_slow_steps(self, now: float) -> None:
        """Warn of the slowest of the steps since the last warning."""
        found = self._record.take_slow_steps()
        if found:
            self._warned_slow = now
            TELEMETRY.count("slow_steps", len(found))
            _warn_of_step(max(found, key=lambda step: step.seconds / step.usual_s), len(found) - 1)


def _warn_of_step(step: SlowStep, num_others: int) -> None:
    line, times = user_line(step.place), step.seconds / step.usual_s
    logger.warning(
        "step %d (%s) took %.4g s, %.1f times the median of %.4g s, on host %s (process %d)%s. Last program: %s. At %s",
        step.number,
        step.kind,
        step.seconds,
        times,
        step.usual_s,
        socket.gethostname(),
        os.getpid(),
        f"; programs compiled meanwhile: {step.num_compiled}" if step.num_compiled else "",
        step.last_program or "none since the watch began",
        line + (f". Other slow steps since the last warning: {num_others}" if num_others else ""),
        extra={
            "event": "slow_step",
            "step": step.number,
            "seconds": step.seconds,
            "usual_seconds": step.usual_s,
            "program": step.last_program,
            "line": line,
        },
    )
