"""A hunt: programs by seed in worker processes, their outcomes counted, failures shrunk and written down."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.hunt.program import Program
from tests.hunt.results import Results, commit_now
from tests.hunt.script import script
from tests.hunt.shrink import drawn_smaller, shrunk
from tests.hunt.worker import ROOT, Worker

BATCH = 25
FAILURES = ("wrong", "raised", "crashed", "broken")
OUT = ROOT / "out" / "hunt"


class Hunt:
    """Hands seeds to threads, each with its own worker processes.

    Args:
        seeds: What is hunted with.
        workers: How many processes at a time.
        deadline: `time.monotonic()` when no new program is begun.
        shrink_s: Seconds spent on making a failure small; 0 leaves it as it is.
        record: Called with the results whenever a seed is done.
        each: Each program begins with a statement of one of these families; empty: any program.
    """

    def __init__(
        self,
        seeds: Iterator[int],
        workers: int,
        deadline: float,
        *,
        shrink_s: float = 120.0,
        record: Callable[[Results], None] | None = None,
        each: tuple[str, ...] = (),
    ) -> None:
        self.results, self.failures = Results(), []
        self._seeds, self._workers, self._deadline = seeds, workers, deadline
        self._shrink_s, self._record, self._each = shrink_s, record, each
        self._lock, self._commit = threading.Lock(), commit_now()
        self._kinds: set[str] = set()

    def run(self) -> Results:
        """Until the seeds or the time are over, or Ctrl-C."""
        threads = [threading.Thread(target=self._work) for _ in range(self._workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            try:
                thread.join()
            except KeyboardInterrupt:  # what was found is kept
                self._deadline = 0.0
                thread.join()
        return self.results

    def _work(self) -> None:
        from tests.hunt.drawing import is_sharded

        workers = {sharded: Worker(is_sharded=sharded) for sharded in (False, True)}
        try:
            while (seed := self._next()) is not None:
                for index in range(BATCH):
                    if time.monotonic() > self._deadline:
                        return
                    self._one(workers[is_sharded(seed)], seed, index)
                if self._record is not None:
                    with self._lock:
                        self._record(self.results)
        finally:
            for worker in workers.values():
                worker.close()

    def _next(self) -> int | None:
        with self._lock:
            return next(self._seeds, None)

    def _one(self, worker: Worker, seed: int, index: int) -> None:
        question = {"seed": seed, "index": index, "each": self._each}
        answer = worker.ask(question)
        if answer["program"] is None:  # what it was is known without running it
            answer["program"] = worker.ask({**question, "only_draw": True})["program"]
        program, outcome = Program.from_json(answer["program"]), answer["outcome"]
        with self._lock:
            has_buckets = program.configuration.has_buckets
            self.results.add(seed, outcome, has_buckets=has_buckets, commit=self._commit, each=self._each)
        if outcome["status"] in FAILURES:
            self._report(worker, f"{seed}-{index}", program, outcome)
        elif outcome["status"] in ("torch", "uncaptured") and outcome["ops"]:  # values, which are worth a look
            write(OUT / f"{seed}-{index}-{outcome['status']}.py", program, "excused", outcome["text"])

    def _report(self, worker: Worker, name: str, program: Program, outcome: dict[str, Any]) -> None:
        status, text = outcome["status"], outcome["text"]
        with self._lock:
            self.failures.append((name, status, text))
            is_new = kind_of(text) not in self._kinds
            self._kinds.add(kind_of(text))
        _say(f"{name} {status} {'+'.join(program.families)}: {text.splitlines()[0] if text else ''}")
        if self._shrink_s and is_new:
            fails = _fails_alike(worker, status, text)
            program = self._drawn_smaller(name, fails) or program
            program = shrunk(program, fails, self._shrink_s * 2 / 3)
            text = worker.ask({"program": program.to_json()})["outcome"]["text"] or text
        write(OUT / f"{name}.py", program, status, text)

    def _drawn_smaller(self, name: str, fails: Callable[[Program], bool]) -> Program | None:
        from tests.hunt.drawing import is_sharded, number_of, programs

        seed, index = map(int, name.split("-"))
        strategy = programs(is_sharded=is_sharded(seed), each=self._each)
        return drawn_smaller(strategy, number_of(seed, index), fails, self._shrink_s / 3)


def kind_of(text: str) -> str:
    """What failures have in common that are likely one."""
    import re

    return re.sub(r"\d[\d.e+-]*|\[.*?\]|\(.*?\)", "N", text.splitlines()[0] if text else "")


def _fails_alike(worker: Worker, status: str, text: str) -> Callable[[Program], bool]:
    def fails(program: Program) -> bool:
        outcome = worker.ask({"program": program.to_json()})["outcome"]
        return outcome["status"] == status and (status != "raised" or _head(outcome["text"]) == _head(text))

    return fails


def _head(text: str) -> str:
    return kind_of(text)[:40]


def write(path: Path, program: Program, status: str, text: str) -> None:
    """The program as a script, and as what `--again` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script(program, f"{status}: {text}"))
    path.with_suffix(".json").write_text(program.to_json())


def _say(text: str) -> None:
    sys.stderr.write(text[:400] + "\n")
    sys.stderr.flush()
