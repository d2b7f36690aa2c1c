"""Host time of a call on tensors that are already on the XLA device.

XLA runs asynchronously: the time of a call is the time until it returns, not until its result is ready. The main figure
is the main thread's CPU time, which other processes do not affect; wall time is printed too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from bench import report, timing, workloads
from bench.variants import EAGER, KP_TPU, OPENXLA, VARIANTS

NUM_PARAMETERS = (8, 64, 256)
NUM_ROUNDS = 25
CALLS_PER_ROUND = 40
LIMIT_OF_OPENXLA = 0.85


def measure(num_parameters: int) -> dict[str, float]:
    """Microseconds of a call by variant: medians of rounds taken in turns; "<variant> wall" is wall time."""
    calls = {v.name: _ready_call(v.name, num_parameters) for v in (EAGER, OPENXLA, KP_TPU)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for name in timing.turns(list(calls), NUM_ROUNDS):
        taken[name].append(_round_us(calls[name]))
    main_thread = {name: median(cpu for cpu, _ in rounds) for name, rounds in taken.items()}
    return main_thread | {f"{name} wall": median(wall for _, wall in rounds) for name, rounds in taken.items()}


def _ready_call(variant: str, num_parameters: int) -> Callable[[], torch.Tensor]:
    chosen = VARIANTS[variant]
    workload = chosen.placed(workloads.mlp(num_parameters))
    step = chosen.compiled(workload.model.eval().requires_grad_(False))

    def call() -> torch.Tensor:
        return step(*workload.inputs)

    timing.finish(call(), call())
    return call


def _round_us(call: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Mean main-thread and wall microseconds of the calls of one round."""
    with torch.no_grad():
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(CALLS_PER_ROUND):
            result = call()
        spent = time.thread_time() - cpu, time.perf_counter() - wall
    timing.finish(result)
    return spent[0] / CALLS_PER_ROUND * 1e6, spent[1] / CALLS_PER_ROUND * 1e6


def main() -> None:
    cases = [{"num_parameters": number} for number in NUM_PARAMETERS]
    rows: list[dict[str, Any]] = []
    targets = []
    for case, found in zip(cases, timing.medians_of_processes("bench.per_call", cases, num_rounds=1), strict=True):
        for variant in (EAGER, OPENXLA, KP_TPU):
            rows.append(_row(case["num_parameters"], variant.name, found))
        name = f"{case['num_parameters']} parameters, host time over openxla's"
        targets.append(report.Target(name, found[KP_TPU.name] / found[OPENXLA.name], LIMIT_OF_OPENXLA))
    title = (
        f"Host time of a call, MLP with batch 1 (medians of {NUM_ROUNDS} rounds of {CALLS_PER_ROUND} calls, in turns)"
    )
    report.publish(report.Report("per_call", title, rows, tuple(targets)))


def _row(num_parameters: int, variant: str, found: dict[str, float]) -> dict[str, Any]:
    return {
        "parameters": num_parameters,
        "variant": variant,
        "main thread us": found[variant],
        "over openxla": found[variant] / found[OPENXLA.name],
        "wall us": found[f"{variant} wall"],
    }


if __name__ == "__main__":
    main()
