"""The times of the last steps, and which of them was slow."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from statistics import median

from kp_dynamo.telemetry.user_frames import frame_of, user_frame

NUM_KEPT = 50
_NUM_NEEDED = 10  # the first steps compile, and the median of fewer is theirs


@dataclass(frozen=True)
class SlowStep:
    """A step that took too long.

    Attributes:
        number: Its number among the steps of its kind since the watch began, from 1.
        kind: What ends these steps: "AdamW.step", or "backward".
        seconds: The time since the step before it.
        usual_s: The median of the steps before it.
        place: File, line and function of the user's code in the second half of the step, or at its end.
        last_program: The program that was called last when it ended.
        num_compiled: The programs that were compiled during the step.
    """

    number: int
    kind: str
    seconds: float
    usual_s: float
    place: tuple[str, int, str] | None
    last_program: str
    num_compiled: int


class StepTimes:
    """Times from the end of a step to the end of the next, in seconds; for one kind of step.

    The steps of a loop run in one thread; another thread may read the deadline and look at what the loop does.

    Args:
        kind: As in `SlowStep`.
        slow: How many times the median a step must exceed to be slow; None if none is.
    """

    def __init__(self, kind: str, slow: float | None) -> None:
        self.kind, self.number, self._slow = kind, 0, slow
        self._seconds: deque[float] = deque(maxlen=NUM_KEPT)
        self._last: float | None = None
        self._last_compiled = 0
        self._thread = 0
        self._place: tuple[str, int, str] | None = None
        self.deadline: float | None = None

    def ended(self, now: float, last_program: str, num_compiled: int) -> SlowStep | None:
        """Note that a step ended; returns it if it was slow. Called in the thread of the loop."""
        self._thread = threading.get_ident()
        seconds = now - self._last if self._last is not None else None
        compiled, place = num_compiled - self._last_compiled, self._place
        self._last, self._last_compiled, self._place = now, num_compiled, None
        self.number += 1
        if seconds is None:
            return None
        found = None
        if (usual_s := self._usual_s()) is not None and self._slow is not None and seconds > self._slow * usual_s:
            place = place or user_frame(frame_of(self._thread))
            found = SlowStep(self.number, self.kind, seconds, usual_s, place, last_program, compiled)
        self._seconds.append(seconds)
        usual_s = self._usual_s()
        self.deadline = None if usual_s is None or self._slow is None else now + self._slow * usual_s
        return found

    def look(self, now: float) -> None:
        """Note where the loop is if its step has become slow. Called in another thread.

        Again whenever the time of the step has doubled: the place that is kept is one of the second half of the wait.
        """
        deadline, last = self.deadline, self._last
        if deadline is not None and last is not None and now >= deadline:
            self.deadline = now + (now - last)
            self._place = user_frame(frame_of(self._thread))

    def _usual_s(self) -> float | None:
        return median(self._seconds) if len(self._seconds) >= _NUM_NEEDED else None
