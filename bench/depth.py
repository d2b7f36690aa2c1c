"""`python -m bench.depth`: what grows with the number of layers when equal layers are compiled once.

A Llama in training with `blocks="on"`, on the XLA device: width 256 for the first call; narrow for the host time of a
step, so that XLA:CPU has little to compute. Each row is measured in fresh processes, and its seconds are wall time.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from bench import report, timing, workloads
from bench.blocks import MANY
from bench.first_call import run_once
from bench.variants import KP_TPU, settle
from bench.workloads import Workload
from kp_dynamo.backend import kp_tpu
from kp_dynamo.telemetry.counters import TELEMETRY, snapshot

NUM_BLOCKS = (8, MANY, 128)
NUM_RUNS = 3
NUM_STEPS = 30
NARROW = 32
OPTIONS = {"blocks": "on"}
GROUP = 4
"""Layers a program, as "auto" chooses them for the Llama of width 1024."""
LIMIT_OF_DEPTH, LIMIT_OF_HOST = 1.3, 0.25


def measure(num_blocks: int) -> dict[str, float]:
    _step_ms(2)  # modules are imported and torch is ready before the first call is measured
    torch._dynamo.reset()
    TELEMETRY.reset()
    return _first_call(num_blocks) | {"step_ms": _step_ms(num_blocks), "grouped_ms": _step_ms(num_blocks, GROUP)}


def _first_call(num_blocks: int) -> dict[str, float]:
    """Wall seconds of a first call, of the backend, and of its stages."""
    taken: list[float] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        start = time.perf_counter()
        run = kp_tpu(gm, inputs, options=OPTIONS)
        taken.append(time.perf_counter() - start)
        return run

    workload = KP_TPU.placed(workloads.llama(num_blocks))
    step = torch.compile(workload.model.train(), backend=backend)
    start = time.perf_counter()
    run_once(step, workload, "training")
    call_s = time.perf_counter() - start
    seconds = snapshot()["seconds"]
    programs_s = seconds["trace"] + seconds["xla"]
    aot_s = seconds["aot_and_below"] - programs_s  # the backend compiles the programs, all of them before it returns
    return {"call_s": call_s, "backend_s": sum(taken), "aot_s": aot_s, "programs_s": programs_s}


def _step_ms(num_blocks: int, blocks: str | int = "on") -> float:
    """CPU milliseconds of the two threads that call the programs of a training step: this one, and autograd's.

    The least of all steps: other work on the machine only adds to it.
    """
    torch._dynamo.reset()
    workload = KP_TPU.placed(Workload(workloads.Llama(num_blocks, NARROW), workloads.llama(1, NARROW).inputs))
    step = torch.compile(workload.model.train(), backend="kp_tpu", options={"blocks": blocks})
    threads = {threading.get_ident()}

    def call() -> float:
        workload.model.zero_grad()
        start = sum(map(_cpu_s, threads))
        loss = step(*workload.inputs).square().mean()
        loss.register_hook(lambda grad: threads.add(threading.get_ident()))
        loss.backward()
        return (sum(map(_cpu_s, threads)) - start) * 1e3

    taken = []
    for _ in range(NUM_STEPS):
        taken.append(call())
        settle()
    return min(taken)


def _cpu_s(thread: int) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def main() -> None:
    cases = [{"num_blocks": number} for number in NUM_BLOCKS]
    found = dict(zip(NUM_BLOCKS, timing.medians_of_processes("bench.depth", cases, NUM_RUNS), strict=True))
    rows = [_row(number, figures) for number, figures in found.items()]
    few, *_, most = (row["backend s"] for row in rows)
    targets = [report.Target(f"backend: {NUM_BLOCKS[-1]} layers over {NUM_BLOCKS[0]}", most / few, LIMIT_OF_DEPTH)]
    for figure, blocks, each in (("step_ms", "on", 1), ("grouped_ms", "auto", GROUP)):
        modelled_ms = _modelled_ms(blocks)
        name = f"{MANY} layers, {each} a program: host ms over the {modelled_ms:.1f} of width 1024 on a v5e"
        targets.append(report.Target(name, found[MANY][figure] / modelled_ms, LIMIT_OF_HOST))
    title = f"First call and host time of a Llama in training, blocks on (medians of {NUM_RUNS} fresh processes)"
    report.publish(report.Report("depth", title, rows, tuple(targets)))


def _row(num_blocks: int, found: dict[str, float]) -> dict[str, Any]:
    return {
        "layers": num_blocks,
        "first call s": found["call_s"],
        "backend s": found["backend_s"],
        "AOTAutograd and passes s": found["aot_s"],
        "trace and XLA s": found["programs_s"],
        "finding layers s": found["backend_s"] - found["aot_s"] - found["programs_s"],
        "Dynamo and running s": found["call_s"] - found["backend_s"],
        "host ms of a step": found["step_ms"],
        f"with {GROUP} layers a program": found["grouped_ms"],
    }


def _modelled_ms(blocks: str) -> float:
    """The modelled step of the Llama of as many layers, which `bench.blocks` measured."""
    rows = report.last_rows("blocks")
    return next(row["modelled ms"] for row in rows if (row["layers"], row["blocks"]) == (MANY, blocks))


if __name__ == "__main__":
    main()
