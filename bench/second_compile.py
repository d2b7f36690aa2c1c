"""Compiling an equal model a second time in one process: only Dynamo's capture should run."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch._dynamo.utils import counters

from bench import report, timing, workloads
from bench.variants import DYNAMO_ONLY, KP_TPU, OPENXLA, VARIANTS, Variant

NUM_BLOCKS = 8
NUM_RUNS = 5
LIMIT_OF_DYNAMO = 1.15


def measure(variant: str) -> dict[str, float]:
    """CPU-seconds of compiling the first and the second of two equal models, and the work that the second one causes.

    The time is the first call minus a later one, so that running the model does not count. `torch._dynamo.reset()`
    runs in between; otherwise Dynamo reuses its own code and does not call the backend.
    """
    chosen = VARIANTS[variant]
    first_s = _compile_s(chosen)
    torch._dynamo.reset()
    before = _work_done()
    second_s = _compile_s(chosen)
    done = {name: now - before[name] for name, now in _work_done().items()}
    return {"first_s": first_s, "second_s": second_s, **done}


def _compile_s(variant: Variant) -> float:
    workload = variant.placed(workloads.llama(NUM_BLOCKS))
    step = variant.compiled(workload.model.eval())
    return _call_s(step, workload.inputs) - _call_s(step, workload.inputs)


def _call_s(step: Any, inputs: tuple[torch.Tensor, ...]) -> float:
    start = time.process_time()
    with torch.no_grad():
        timing.finish(step(*inputs))
    return time.process_time() - start


def _work_done() -> dict[str, float]:
    """Counters of torch and torch_xla: AOTAutograd traces, and programs that XLA compiled."""
    import torch_xla.debug.metrics as metrics

    compiled = metrics.counter_value("UncachedCompile") or 0
    return {"aot_traces": counters["aot_autograd"]["total"], "xla_programs": compiled}


def main() -> None:
    variants = (DYNAMO_ONLY, OPENXLA, KP_TPU)
    cases = [{"variant": v.name} for v in variants]
    found = timing.medians_of_processes("bench.second_compile", cases, NUM_RUNS)
    dynamo, _, ours = found
    rows = [_row(v.name, f, dynamo) for v, f in zip(variants, found, strict=True)]
    targets = (
        report.Target("second compile over Dynamo alone", ours["second_s"] / dynamo["second_s"], LIMIT_OF_DYNAMO),
        report.Target("AOTAutograd traces in it", ours["aot_traces"], 0),
        report.Target("XLA programs in it", ours["xla_programs"], 0),
    )
    title = f"Compiling a second, equal {NUM_BLOCKS}-block Llama (medians of {NUM_RUNS} fresh processes)"
    report.publish(report.Report("second_compile", title, rows, targets))


def _row(name: str, found: dict[str, Any], dynamo: dict[str, Any]) -> dict[str, Any]:
    return {
        "variant": name,
        "first CPU s": found["first_s"],
        "second CPU s": found["second_s"],
        "over Dynamo alone": found["second_s"] / dynamo["second_s"],
        "AOTAutograd traces": found["aot_traces"],
        "XLA programs": found["xla_programs"],
    }


if __name__ == "__main__":
    main()
