"""The first call of a 32-block Llama: CPU-seconds of the whole process, and the share of our own passes in it.

openxla compiles it in float32; kp_tpu by default in bfloat16, which XLA:CPU emulates with conversions that it also has
to compile. kp_tpu is therefore measured in float32 too, for a fair comparison, with `blocks="on"` and with
`compile_blocks`.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench import report, timing, workloads
from bench.variants import EAGER, KP_TPU, KP_TPU_BLOCKS, KP_TPU_CHILDREN, KP_TPU_FLOAT32, OPENXLA, VARIANTS
from bench.workloads import Workload

COMPARED = (EAGER, OPENXLA, KP_TPU_FLOAT32, KP_TPU, KP_TPU_BLOCKS, KP_TPU_CHILDREN)
NUM_BLOCKS = 32
NUM_RUNS = 5
LIMIT_OF_OPENXLA = 0.75
LIMIT_OF_PASSES = 0.05
LIMITS_OF_BLOCKS = {
    KP_TPU_BLOCKS: {"inference": 0.36, "training": 0.17},
    KP_TPU_CHILDREN: {"inference": 0.12, "training": 0.12},
}


def run_once(step: Any, workload: Workload, mode: str) -> None:
    """One call, with its backward in training; returns when the results are ready."""
    if mode == "inference":
        with torch.no_grad():
            timing.finish(step(*workload.inputs))
        return
    out = step(*workload.inputs)
    out.square().mean().backward()
    timing.finish(out, *[p.grad for p in workload.model.parameters() if p.grad is not None][:1])


def measure(variant: str, mode: str) -> dict[str, float]:
    """CPU-seconds (user and system, all threads) and wall seconds of the first call, and of a later one."""
    chosen = VARIANTS[variant]
    workload = chosen.placed(workloads.llama(NUM_BLOCKS))
    workload.model.train(mode == "training")
    step = chosen.compiled(workload.model)
    cpu, wall = time.process_time(), time.perf_counter()
    run_once(step, workload, mode)
    taken = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return {**taken, "passes_s": _seconds_of_passes() if chosen.backend == KP_TPU.backend else 0.0}


def _seconds_of_passes() -> float:
    from kp_dynamo.telemetry import counters as telemetry

    return telemetry.snapshot()["seconds"].get("passes", 0.0)


def main() -> None:
    rows, targets = [], []
    for mode in ("inference", "training"):
        cases = [{"variant": v.name, "mode": mode} for v in COMPARED]
        found = dict(zip(COMPARED, timing.medians_of_processes("bench.first_call", cases, NUM_RUNS), strict=True))
        rows += [_row(v.name, mode, found[v], found[OPENXLA]) for v in COMPARED]
        for ours in (KP_TPU, KP_TPU_FLOAT32):
            ratio = found[ours]["cpu_s"] / found[OPENXLA]["cpu_s"]
            share = found[ours]["passes_s"] / found[ours]["wall_s"]
            targets += [
                report.Target(f"{mode}, {ours.name}: CPU-seconds over openxla's", ratio, LIMIT_OF_OPENXLA),
                report.Target(f"{mode}, {ours.name}: our passes over the call", share, LIMIT_OF_PASSES),
            ]
        for ours, limits in LIMITS_OF_BLOCKS.items():
            ratio = found[ours]["cpu_s"] / found[OPENXLA]["cpu_s"]
            targets.append(report.Target(f"{mode}, {ours.name}: CPU-seconds over openxla's", ratio, limits[mode]))
    title = f"First call of a {NUM_BLOCKS}-block Llama of width 256 (medians of {NUM_RUNS} fresh processes)"
    report.publish(report.Report("first_call", title, rows, tuple(targets)))


def _row(name: str, mode: str, found: dict[str, Any], openxla: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": mode,
        "variant": name,
        "CPU s": found["cpu_s"],
        "over openxla": found["cpu_s"] / openxla["cpu_s"],
        "wall s": found["wall_s"],
        "our passes, wall s": found["passes_s"],
    }


if __name__ == "__main__":
    main()
