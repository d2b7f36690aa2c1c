"""A process that checks programs, so that one that kills it is a result like any other.

Run as `python -m tests.hunt.worker`: reads a line of JSON, `{"seed": 1, "index": 2, "each": []}` or `{"program": ...}`,
and answers with a line of JSON, the program and its outcome.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.hunt.program import Program

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300.0
# Caches of torch, torch_xla and XLA grow with every program.
PROGRAMS_A_PROCESS = 250


class Worker:
    """Checks programs in a child process, started when needed and again after it died or has grown.

    Args:
        is_sharded: The process has four devices.
        timeout_s: For one program; a process that takes longer is killed.
    """

    def __init__(self, *, is_sharded: bool = False, timeout_s: float = 180.0) -> None:
        self._is_sharded, self._timeout_s = is_sharded, timeout_s
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()
        self._served = 0

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer; its outcome is "crashed" when the process died over it or never answered."""
        if self._served >= PROGRAMS_A_PROCESS:
            self.close()
        process = self._running()
        assert process.stdin is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError, queue.Empty):
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = self._answers.get(timeout=self._timeout_s)
        if answer:
            self._served += 1
            return json.loads(answer)
        code = self.close()
        text = f"no answer in {self._timeout_s} s" if code == -9 else f"exit code {code}"
        return {"program": question.get("program"), "outcome": {"status": "crashed", "text": text}}

    def close(self) -> int:
        """End the process; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if process.poll() is None:
            process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return code

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
            if self._is_sharded:
                environment["CPU_NUM_DEVICES"] = "4"
            command = [sys.executable, "-W", "ignore", "-m", "tests.hunt.worker", *(["sharded"] * self._is_sharded)]
            self._process = subprocess.Popen(
                command, env=environment, cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._answers, self._served = queue.Queue(), 0
            threading.Thread(target=_pump, args=(self._process, self._answers), daemon=True).start()
            # Imports take long on a busy machine, and are no program's time.
            self._answers.get(timeout=START_TIMEOUT_S)
        return self._process


def _pump(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):
        for line in process.stdout:
            answers.put(line)
    process.wait()
    answers.put("")


def _serve(is_sharded: bool) -> None:
    # What torch and XLA print themselves must not be read as an answer.
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        prepare(is_sharded=is_sharded)
        answers.write("ready\n")
        for line in sys.stdin:
            answers.write(json.dumps(answer(json.loads(line))) + "\n")


def prepare(*, is_sharded: bool = False) -> None:
    """Start the device, before any backward on the CPU."""
    import logging

    import torch

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if is_sharded:
        from tests.hunt import sharding

        sharding.start()
    from kp_dynamo.compat import xla

    torch.ones(1, device=xla.device())


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Check the program that is asked for."""
    from kp_dynamo import clear_cache
    from kp_dynamo.compat import xla
    from tests.hunt.check import check
    from tests.hunt.program import Program

    given = question.get("program")
    program = Program.from_json(given) if given else _drawn(question)
    if question.get("only_draw"):
        return {"program": program.to_json(), "outcome": {"status": "drawn", "text": ""}}
    try:
        outcome = asdict(check(program))
    except Exception:  # noqa: BLE001
        outcome = {"status": "broken", "text": f"the hunter itself: {traceback.format_exc()[-600:]}"}
    clear_cache()
    # What eager code on XLA tensors could not run, torch_xla reports to whoever comes next.
    with contextlib.suppress(RuntimeError):
        xla.synchronize()
    return {"program": program.to_json(), "outcome": outcome}


def _drawn(question: dict[str, Any]) -> Program:
    from tests.hunt.drawing import program_of

    return program_of(question["seed"], question["index"], tuple(question.get("each", ())))


if __name__ == "__main__":
    _serve("sharded" in sys.argv)
