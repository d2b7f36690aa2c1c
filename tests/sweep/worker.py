"""A process that checks operators, so that one that kills it is a result like any other.

Run as `python -m tests.sweep.worker SUBJECT`: reads the name of an operator a line, after what is checked of it (see
`CHECKS`) if that is not its plain samples; answers with an outcome's JSON.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from tests.sweep.check import SUBJECTS, Outcome, check
from tests.sweep.extremes import check_floats, check_integers, check_shapes, check_whole

CHECKS = {"floats": check_floats, "integers": check_integers, "whole": check_whole, "shapes": check_shapes}
"""Of an operator's samples, changed: asked for as "floats of add"."""

_START_TIMEOUT_S = 600.0
_ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """Checks operators in a child process, started when needed and again after it died."""

    def __init__(self, subject: str, timeout_s: float = 120.0) -> None:
        self._subject, self._timeout_s = subject, timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader: threading.Thread | None = None

    def check(self, name: str) -> Outcome:
        """The outcome for one operator; "crash" when the process died over it or never answered."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(name + "\n")
        process.stdin.flush()
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            answer = ""
        if answer:
            return Outcome(**json.loads(answer))
        code = self.close()
        return Outcome(name, "crash", f"no answer in {self._timeout_s} s" if code == -9 else f"exit code {code}")

    def close(self) -> int:
        """End the process; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.kill()
        code = process.wait()
        assert self._reader is not None
        self._reader.join()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            command = [sys.executable, "-m", "tests.sweep.worker", self._subject]
            environment = {**os.environ, "PJRT_DEVICE": "CPU"}
            self._process = subprocess.Popen(
                command, env=environment, cwd=_ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._answers = queue.Queue()
            self._reader = threading.Thread(target=_pump, args=(self._process, self._answers), daemon=True)
            self._reader.start()
            # Imports take long on a busy machine, and are no operator's time.
            self._answers.get(timeout=_START_TIMEOUT_S)
        return self._process


def _pump(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    process.wait()
    answers.put("")


def _serve(subject: str) -> None:
    # What operators and XLA print themselves must not be read as an answer.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        answers.write("ready\n")
        for line in sys.stdin:
            what, _, name = line.strip().rpartition(" of ")
            answers.write(json.dumps(asdict(CHECKS.get(what, check)(name, SUBJECTS[subject]))) + "\n")


if __name__ == "__main__":
    _serve(sys.argv[1])
