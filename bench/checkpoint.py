"""`make bench-checkpoint`: the cost of a training step on a v5e, by what the backward recomputes.

A GPT of 12 blocks, width 768, 12 heads, 8192 tokens, B 4, S 1024, with its loss, at level balanced, by the v5e's own
compiler: estimates, no chip ran this. Ratios are to "off", the min-cut partitioner, at the same number of blocks.
openxla traces with real tensors on XLA:CPU and saves gigabytes of activations, so its row has fewer blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.workloads import Workload
from demo.model import Gpt, next_byte_loss
from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.request import Machine, request_of
from kp_dynamo.aot.trace_programs import call_on_fakes
from kp_dynamo.graph.peak_memory import peak_memory
from kp_dynamo.hardware import CHIPS
from kp_dynamo.lowering.fake_run import ExportedProgram
from kp_dynamo.runtime.events import ignore

WIDTH, NUM_HEADS, NUM_TOKENS = 768, 12, 8192
BATCH, LENGTH = 4, 1024
NUM_BLOCKS, OPENXLA_BLOCKS = 12, 2
MIB = 2**20
OFF, OPENXLA = "off", "openxla"
BUDGET = 0.6  # of what "off" takes, for "auto"
DIVIDED = "blocks, layers compiled once"
MODES = ("attention", "blocks", 0.3, 0.6, "auto")
# With the operator of `rewrite_attention` there are no scores to save or recompute.
WITH_SCORES: dict[str, Any] = {"disable_passes": ["rewrite_attention"], "blocks": "off"}
REWRITTEN = {"off": "off, attention rewritten", "blocks": "blocks, attention rewritten"}
COMPARED = ("peak MiB", "TFLOP", "Mcycles", "modelled ms")
LIMITS = {
    "attention": {"peak MiB": 0.65, "TFLOP": 1.20},
    "blocks": {"peak MiB": 0.25, "TFLOP": 1.35},
    DIVIDED: {"peak MiB": 0.20, "TFLOP": 1.35},
    "auto": {"peak MiB": BUDGET, "TFLOP": 1.20},
}


class Trained(nn.Module):
    """Tokens [B, S] int64 -> the mean loss of the next tokens."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.model = Gpt(num_blocks, WIDTH, NUM_HEADS, NUM_TOKENS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return next_byte_loss(self.model, tokens, targets)


def workload(num_blocks: int) -> Workload:
    """On the meta device."""
    with torch.device("meta"):
        tokens = torch.empty(BATCH, LENGTH, dtype=torch.int64)
        return Workload(Trained(num_blocks), (tokens, tokens.clone()))


def measure(num_blocks: int, **how: Any) -> AotReport:
    made = workload(num_blocks)
    return kp_dynamo.aot_compile(made.model, made.inputs, target="v5e", train=True, **how)


def row(name: str, num_blocks: int, found: AotReport) -> dict[str, Any]:
    """Figures of a step, and of the largest programs that it is made of."""
    forward, backward = (
        max((p for p in found.programs if kind in p.name), key=lambda p: p.peak_bytes, default=None)
        for kind in ("forward", "backward")
    )
    return {
        "checkpoint": name,
        "blocks": num_blocks,
        # Of a divided step no program says what the step holds.
        "peak MiB": (found.step_peak_bytes if name == DIVIDED else found.peak_bytes) / MIB,
        "TFLOP": found.flops / 1e12,
        "Mcycles": found.cycles / 1e6,
        "modelled ms": found.modelled_ms,
        "model TFLOP": found.model_flops / 1e12,
        "forward peak MiB": forward.peak_bytes / MIB if forward else None,
        "backward peak MiB": backward.peak_bytes / MIB if backward else None,
        "backward temporaries MiB": backward.temp_bytes / MIB if backward else None,
        "TPU compile s": found.tpu_compile_s,
        "unknown": len(found.unknown),
    }


def with_ratios(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    return {**found, **{f"{name} ratio": found[name] / base[name] for name in COMPARED}}


def targets(rows: list[dict[str, Any]]) -> tuple[report.Target, ...]:
    """The targets of the modes that were measured."""
    by_mode = {r["checkpoint"]: r for r in rows}
    return tuple(
        report.Target(f"{mode}: {name} over off's", by_mode[mode][f"{name} ratio"], limit)
        for mode, limits in LIMITS.items()
        if mode in by_mode
        for name, limit in limits.items()
    )


def options_of(mode: str | float, off_peak_bytes: float) -> dict[str, Any]:
    """Give "auto" a memory budget, without optimizer state, which these programs do not hold."""
    if mode != "auto":
        return WITH_SCORES | {"checkpoint": mode}
    return WITH_SCORES | {
        "checkpoint": mode,
        "memory_budget_gb": BUDGET * off_peak_bytes / 1e9,
        "optimizer_state_factor": 0,
    }


def add_estimates() -> None:
    """Add our memory estimate to the rows of the last run, which needs no compiler."""
    rows = report.last_rows("checkpoint")
    every = {(c.name, c.num_blocks): c for c in cases(NUM_BLOCKS, OPENXLA_BLOCKS)}
    for found in tqdm([r for r in rows if r["checkpoint"] != OPENXLA], unit="row"):
        base = next(r for r in rows if r["blocks"] == found["blocks"] and r["checkpoint"] == OFF)
        how = every[found["checkpoint"], found["blocks"]].how(base["peak MiB"] * MIB)
        found["estimate MiB"] = estimated_mib(found["blocks"], how["options"])
        found["estimate's error"] = found["estimate MiB"] / found["peak MiB"] - 1
    report.write(report.Report("checkpoint", title(NUM_BLOCKS), rows, targets(rows)))


def estimated_mib(num_blocks: int, options: dict[str, Any]) -> float:
    """The estimate for the larger program, from the graphs alone."""
    made, programs = workload(num_blocks), list[ExportedProgram]()
    torch._dynamo.reset()
    call_on_fakes(request_of(made.model, made.inputs, Machine("v5e"), options, "kp_tpu", True), programs.append, ignore)
    vmem = CHIPS["v5e"].vmem_bytes
    return max(peak_memory(p.gm.graph, vmem, narrow_matmuls=False).total for p in programs) / MIB


@dataclass(frozen=True)
class Case:
    """A row: how its step is compiled, by the bytes that "off" takes."""

    name: str
    num_blocks: int
    how: Callable[[float], dict[str, Any]]


def cases(num_blocks: int, openxla_blocks: int) -> list[Case]:
    """All rows, each after the "off" row that it is compared with."""
    found = [Case(f"{mode}", num_blocks, partial(_with_mode, mode)) for mode in (OFF, *MODES)]
    found += [Case(name, num_blocks, partial(_rewritten, mode)) for mode, name in REWRITTEN.items()]
    found.append(Case(DIVIDED, num_blocks, _divided))
    if openxla_blocks:
        found += [Case(OFF, openxla_blocks, partial(_with_mode, OFF)), Case(OPENXLA, openxla_blocks, _by_openxla)]
    return found


def _with_mode(mode: str | float, off_peak_bytes: float) -> dict[str, Any]:
    return {"options": options_of(mode, off_peak_bytes)}


def _rewritten(mode: str, _: float) -> dict[str, Any]:
    return {"options": {"checkpoint": mode, "blocks": "off"}}


def _divided(_: float) -> dict[str, Any]:
    return {"options": {"checkpoint": "blocks", "blocks": "on"}}


def _by_openxla(_: float) -> dict[str, Any]:
    return {"backend": OPENXLA}


def run(chosen: list[Case], wanted: list[str] | None, num_blocks: int) -> report.Report:
    """Measure the wanted cases, all by default, and keep the last run's rows of the others. Written after every row."""
    before = [] if wanted is None else report.last_rows("checkpoint")
    last = {(row["checkpoint"], row["blocks"]): _measured(row) for row in before}
    rows: list[dict[str, Any]] = []
    offs: dict[int, dict[str, Any]] = {}
    for case in tqdm(chosen, unit="compile"):
        found = last.get((case.name, case.num_blocks))
        if wanted is None or case.name in wanted:
            off_peak = offs[case.num_blocks]["peak MiB"] * MIB if case.num_blocks in offs else 0.0
            found = row(case.name, case.num_blocks, measure(case.num_blocks, **case.how(off_peak)))
        if found is None:
            continue
        base = offs.setdefault(case.num_blocks, found)
        rows.append(with_ratios(found, base))
        report.write(report.Report("checkpoint", title(num_blocks), rows, targets(rows)))
    return report.Report("checkpoint", title(num_blocks), rows, targets(rows))


def _measured(found: dict[str, Any]) -> dict[str, Any]:
    return {name: cell for name, cell in found.items() if not name.startswith("estimate")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.checkpoint", description=__doc__)
    parser.add_argument("--blocks", type=int, default=NUM_BLOCKS, help=f"of the model; {NUM_BLOCKS} by default")
    parser.add_argument("--openxla-blocks", type=int, default=OPENXLA_BLOCKS, help="of openxla's row; 0 leaves it out")
    parser.add_argument("--rows", nargs="+", help="measure only these (off, auto, ...); others are the last run's")
    parser.add_argument("--estimates", action="store_true", help="add the estimate to the rows of the last run")
    args = parser.parse_args()
    if args.estimates:
        add_estimates()
        return
    report.publish(run(cases(args.blocks, args.openxla_blocks), args.rows, args.blocks))


def title(num_blocks: int) -> str:
    return (
        f"A training step of a GPT of {num_blocks} blocks, width {WIDTH}, B {BATCH}, S {LENGTH}, on a v5e by its "
        "compiler (estimates; no chip ran this)"
    )


if __name__ == "__main__":
    main()
