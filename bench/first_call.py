"""The first call of a 32-block Llama: CPU-seconds of the whole process, and the share of our own passes in it."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench import report, timing, workloads
from bench.variants import EAGER, KP_TPU, OPENXLA, VARIANTS
from bench.workloads import Workload

NUM_BLOCKS = 32
NUM_RUNS = 5
LIMIT_OF_OPENXLA = 0.75
LIMIT_OF_PASSES = 0.05


def run_once(step: Any, workload: Workload, mode: str) -> None:
    """One call, with its backward in training; returns when the results are there."""
    if mode == "inference":
        with torch.no_grad():
            timing.finish(step(*workload.inputs))
        return
    out = step(*workload.inputs)
    out.square().mean().backward()
    timing.finish(out, *[p.grad for p in workload.model.parameters()][:1])


def measure(variant: str, mode: str) -> dict[str, float]:
    """CPU-seconds (user and system, all threads) and wall seconds of the first call, and of a later one."""
    chosen = VARIANTS[variant]
    workload = chosen.placed(workloads.llama(NUM_BLOCKS))
    workload.model.train(mode == "training")
    step = chosen.compiled(workload.model)
    cpu, wall = time.process_time(), time.perf_counter()
    run_once(step, workload, mode)
    taken = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return {**taken, "passes_s": _seconds_of_passes() if chosen == KP_TPU else 0.0}


def _seconds_of_passes() -> float:
    from kp_dynamo import telemetry

    return telemetry.snapshot()["seconds"].get("passes", 0.0)


def main() -> None:
    rows, targets = [], []
    for mode in ("inference", "training"):
        variants = (EAGER, OPENXLA, KP_TPU)
        cases = [{"variant": v.name, "mode": mode} for v in variants]
        eager, openxla, ours = timing.medians_of_processes("bench.first_call", cases, NUM_RUNS)
        rows += [_row(v.name, mode, found, openxla) for v, found in zip(variants, (eager, openxla, ours), strict=True)]
        targets += [
            report.Target(f"{mode}, CPU-seconds over openxla's", ours["cpu_s"] / openxla["cpu_s"], LIMIT_OF_OPENXLA),
            report.Target(f"{mode}, our passes over the call", ours["passes_s"] / ours["wall_s"], LIMIT_OF_PASSES),
        ]
    title = f"First call of a {NUM_BLOCKS}-block Llama of width 256 (medians of {NUM_RUNS} fresh processes)"
    report.publish(report.Report("first_call", title, rows, tuple(targets)))


def _row(name: str, mode: str, found: dict[str, Any], openxla: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": mode,
        "variant": name,
        "CPU s": found["cpu_s"],
        "over openxla": found["cpu_s"] / openxla["cpu_s"],
        "wall s": found["wall_s"],
        "of it passes s": found["passes_s"],
    }


if __name__ == "__main__":
    main()
