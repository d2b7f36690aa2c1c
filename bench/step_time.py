"""Steady-state time of inference and training steps of small models, on XLA:CPU and in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import report, timing, workloads
from bench.first_call import run_once
from bench.variants import EAGER, KP_TPU, KP_TPU_FLOAT32, OPENXLA, Variant

COMPARED = (EAGER, OPENXLA, KP_TPU_FLOAT32, KP_TPU)
NUM_ROUNDS = 9
NUM_WARM_UP = 2


def measure(model: str, mode: str) -> dict[str, float]:
    """Milliseconds of a step by variant: medians of steps taken in turns."""
    steps = {variant.name: _ready_step(variant, model, mode) for variant in COMPARED}
    return timing.medians_of_turns({n: lambda s=s: timing.wall_ms(s) for n, s in steps.items()}, NUM_ROUNDS)


def _ready_step(variant: Variant, model: str, mode: str) -> Callable[[], None]:
    workload = variant.placed(workloads.SMALL[model]())
    workload.model.train(mode == "training")
    compiled = variant.compiled(workload.model)

    def step() -> None:
        workload.model.zero_grad(set_to_none=True)
        run_once(compiled, workload, mode)

    for _ in range(NUM_WARM_UP):
        step()
    return step


def main() -> None:
    cases = [{"model": model, "mode": mode} for mode in ("inference", "training") for model in workloads.SMALL]
    found = timing.medians_of_processes("bench.step_time", cases, num_rounds=1)
    rows = [_row(case, taken, variant.name) for case, taken in zip(cases, found, strict=True) for variant in COMPARED]
    title = f"Steady-state step of two blocks of width 256, batch 4 x 128 (medians of {NUM_ROUNDS} steps, in turns)"
    report.publish(report.Report("step_time", title, rows))


def _row(case: dict[str, str], taken: dict[str, float], variant: str) -> dict[str, Any]:
    return {
        **case,
        "variant": variant,
        "ms": taken[variant],
        "over openxla": taken[variant] / taken[OPENXLA.name],
        "over eager": taken[variant] / taken[EAGER.name],
    }


if __name__ == "__main__":
    main()
