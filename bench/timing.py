"""Timing: variants take turns, so that a busy machine affects all of them alike, and medians are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from statistics import median
from typing import Any

import torch


def turns(names: Sequence[str], num_rounds: int) -> Iterator[str]:
    """Each name once a round, in alternating order: A B, B A, A B, ..."""
    for number in range(num_rounds):
        yield from names if number % 2 == 0 else reversed(names)


def medians_of_turns(cases: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, float]:
    """Medians of what the cases measure of themselves, taken in turns."""
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for name in turns(list(cases), num_rounds):
        taken[name].append(cases[name]())
    return {name: median(values) for name, values in taken.items()}


def finish(*results: torch.Tensor) -> None:
    """Wait for results on the XLA device; fetching one element of each waits for its program."""
    for result in results:
        if result.device.type == "xla":
            result.detach().flatten()[:1].cpu()


def wall_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one `run()`, which must wait for its own results."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def in_fresh_process(module: str, **arguments: str | int) -> dict[str, Any]:
    """What `module.measure(**arguments)` returns in a new interpreter, where every first call is a first call."""
    command = [sys.executable, "-m", "bench.timing", module, json.dumps(arguments)]
    # An installed package has its bytecode: without it, compiling our own files would count in the first call.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {module} {arguments} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def medians_of_processes(module: str, cases: Sequence[dict[str, Any]], num_rounds: int) -> list[dict[str, Any]]:
    """For each case the element-wise median of what `num_rounds` fresh processes measured, taken in turns."""
    taken: dict[str, list[dict[str, Any]]] = {json.dumps(case): [] for case in cases}
    for name in turns(list(taken), num_rounds):
        taken[name].append(in_fresh_process(module, **json.loads(name)))
    return [{key: median(run[key] for run in runs) for key in runs[0]} for runs in taken.values()]


if __name__ == "__main__":
    print(json.dumps(import_module(sys.argv[1]).measure(**json.loads(sys.argv[2]))))
