"""`python -m bench.buckets`: a hundred lengths, padded to buckets or compiled one by one.

openxla compiles every length, so its time grows with the number of lengths, while that of the buckets does not. A run
with fewer lengths, such as `--lengths 25`, therefore favors openxla.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import torch

from bench import report, timing, workloads
from bench.first_call import run_once
from bench.variants import KP_TPU, OPENXLA, VARIANTS
from bench.workloads import Workload
from kp_dynamo import mark_sequence

BUCKETS = (64, 128, 256, 512)
NUM_LENGTHS = 100
NUM_STEPS = 9
LIMIT_OF_OPENXLA, LIMIT_OF_STATIC = 0.2, 1.15
MODELS: dict[str, Callable[..., Workload]] = {
    "llama": lambda length: workloads.llama(num_blocks=2, batch=2, length=length),
    "bert": lambda length: workloads.bert(num_blocks=2, batch=2, length=length),
}
OPTIONS: dict[str, Any] = {"buckets": list(BUCKETS)}


def lengths(count: int) -> list[int]:
    """Distinct lengths of 1 to 512, in random order."""
    return random.Random(workloads.SEED).sample(range(1, BUCKETS[-1] + 1), count)


def measure(model: str, variant: str, count: int) -> dict[str, float]:
    """Wall seconds of a step at each length, compiles included, and how many programs XLA compiled for them.

    openxla captures each length separately: with symbolic sizes it fails on layer norms, and compiles just as often.
    """
    import torch_xla.debug.metrics as metrics

    chosen = VARIANTS[variant]
    first = chosen.placed(MODELS[model](BUCKETS[-1]))
    first.model.eval()
    inputs = [tuple(t[:, :n].contiguous() for t in MODELS[model](BUCKETS[-1]).inputs) for n in lengths(count)]
    is_ours = chosen.name == KP_TPU.name
    run = torch.compile(
        first.model,
        backend=chosen.backend or "eager",
        options=OPTIONS if is_ours else None,
        dynamic=None if is_ours else False,
    )
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10 * NUM_LENGTHS
    before, start = metrics.counter_value("UncachedCompile") or 0, time.perf_counter()
    with torch.no_grad():
        for tensors in inputs:
            placed = [t.to(chosen.device()) for t in tensors]
            run(
                *(mark_sequence(t, 1) if is_ours else t for t in placed)
            ).cpu()  # the whole result: slicing would compile a program per length
    taken = time.perf_counter() - start
    return {"total_s": taken, "programs": (metrics.counter_value("UncachedCompile") or 0) - before}


def measure_step(model: str, mode: str) -> dict[str, float]:
    """Milliseconds of a step at the size of a bucket, by buckets and compiled for just that size."""
    steps = {name: _step(model, mode, name) for name in ("buckets", "static")}
    return timing.medians_of_turns({n: lambda s=s: timing.wall_ms(s) for n, s in steps.items()}, NUM_STEPS)


def _step(model: str, mode: str, way: str) -> Callable[[], None]:
    workload = KP_TPU.placed(MODELS[model](BUCKETS[1]))
    workload.model.train(mode == "training")
    if way == "buckets":
        workload = Workload(workload.model, tuple(mark_sequence(t, 1) for t in workload.inputs))
    options = OPTIONS if way == "buckets" else None
    compiled = torch.compile(
        workload.model, backend="kp_tpu", options=options, dynamic=None if way == "buckets" else False
    )

    def step() -> None:
        workload.model.zero_grad(set_to_none=True)
        run_once(compiled, workload, mode)

    step()
    torch._dynamo.config.recompile_limit = 64
    return step


def main(count: int = NUM_LENGTHS) -> None:
    rows: list[dict[str, Any]] = []
    targets = []
    for model in MODELS:
        stock, ours = (
            timing.in_fresh_process("bench.buckets", model=model, variant=v.name, count=count)
            for v in (OPENXLA, KP_TPU)
        )
        steps = {mode: measure_step(model, mode) for mode in ("inference", "training")}
        rows += [{"model": model, "variant": v, **found} for v, found in (("openxla", stock), ("buckets", ours))]
        targets += [
            report.Target(f"{model}: programs", ours["programs"], len(BUCKETS) + 2),
            report.Target(f"{model}: time over openxla's", ours["total_s"] / stock["total_s"], LIMIT_OF_OPENXLA),
            *(
                report.Target(f"{model}: {mode} step over static", s["buckets"] / s["static"], LIMIT_OF_STATIC)
                for mode, s in steps.items()
            ),
        ]
    title = f"{count} lengths of 1 to {BUCKETS[-1]}, inference, buckets {list(BUCKETS)}; two blocks of width 256"
    report.publish(report.Report("buckets", title, rows, tuple(targets)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.buckets", description=__doc__)
    parser.add_argument("--lengths", type=int, default=NUM_LENGTHS, help=f"how many; {NUM_LENGTHS} by default")
    main(parser.parse_args().lengths)
