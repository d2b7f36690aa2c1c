"""`python -m bench.memory_estimate`: the error of our memory estimate against a v5e's compiler.

Training steps of the models of `bench/workloads.py`, two blocks each. A step's peak is that of its larger program,
which `checkpoint="auto"` uses too. The compiler's figure is arguments, results, temporaries and the program's own code,
which is also listed separately. `rewrite_attention` is disabled, because a graph does not show the memory inside its
operators. No chip ran this.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from bench import report, workloads
from bench.checkpoint import WITH_SCORES
from bench.workloads import Workload
from kp_dynamo.aot.compiler import TpuCompiler
from kp_dynamo.aot.peak_bytes import peak_bytes
from kp_dynamo.aot.request import Machine, request_of
from kp_dynamo.aot.trace_programs import call_on_fakes
from kp_dynamo.graph.peak_memory import peak_memory
from kp_dynamo.hardware import CHIPS
from kp_dynamo.lowering.fake_run import ExportedProgram
from kp_dynamo.runtime.events import ignore

CHIP = CHIPS["v5e"]
MIB = 2**20
LIMIT = 0.10
SIZES = {"width 512, B 8, S 512": (512, 8, 512), "width 256, B 4, S 1024": (256, 4, 1024)}
MODELS: dict[str, Callable[..., Workload]] = {
    "gpt": workloads.gpt, "llama": workloads.llama, "bert": workloads.bert,
}  # fmt: skip
MODES: tuple[dict[str, Any], ...] = ({"checkpoint": "off"}, {"checkpoint": "attention"}, {"checkpoint": "blocks"})
IN_FLOAT32 = {"checkpoint": "off", "precision": "float32", "matmul_precision": "default"}


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    """(model, size, options): every mode at the first size, "off" at the second, one in float32."""
    first, second = SIZES
    every = [(model, first, mode) for model in MODELS for mode in MODES]
    return [*every, *((model, second, MODES[0]) for model in MODELS), ("gpt", first, IN_FLOAT32)]


def measure(model: str, size: str, options: dict[str, Any]) -> dict[str, Any]:
    """One row."""
    found: list[ExportedProgram] = []
    with TpuCompiler("v5e") as compiler:

        def receive(program: ExportedProgram) -> None:
            found.append(program)
            compiler.submit(program.stablehlo)

        _export(model, size, options, receive)
        compiled = [compiler.result() for _ in found]
    estimates = _estimates(found, options)
    largest = max(compiled, key=peak_bytes)
    return {
        "model": model,
        "size": size,
        "precision": options.get("precision", "bfloat16"),
        "checkpoint": options["checkpoint"],
        "compiler MiB": peak_bytes(largest) / MIB,
        "estimate MiB": max(estimates) / MIB,
        "error": max(estimates) / peak_bytes(largest) - 1,
        "forward's error": estimates[0] / peak_bytes(compiled[0]) - 1,
        "code MiB": largest.generated_code_bytes / MIB,
    }


def estimated_again(row: dict[str, Any], case: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the last run with a new estimate and the compiler's old figure."""
    programs: list[ExportedProgram] = []
    _export(*case, programs.append)
    estimate = max(_estimates(programs, case[-1])) / MIB
    kept = {name: cell for name, cell in row.items() if name != "forward's error"}
    return kept | {"estimate MiB": estimate, "error": estimate / row["compiler MiB"] - 1}


def _export(model: str, size: str, options: dict[str, Any], receive: Callable[[ExportedProgram], None]) -> None:
    width, batch, length = SIZES[size]
    made = MODELS[model](num_blocks=2, width=width, batch=batch, length=length)
    torch._dynamo.reset()  # otherwise a second size of a model would become dynamic
    call_on_fakes(
        request_of(made.model, made.inputs, Machine("v5e"), WITH_SCORES | options, "kp_tpu", True), receive, ignore
    )


def _estimates(programs: list[ExportedProgram], options: dict[str, Any]) -> list[int]:
    is_narrow = _is_narrow(options)
    return [peak_memory(p.gm.graph, CHIP.vmem_bytes, narrow_matmuls=is_narrow).total for p in programs]


def _is_narrow(options: dict[str, Any]) -> bool:
    return options.get("matmul_precision") == "default"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.memory_estimate", description=__doc__)
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="keep the rows of the last run")
    parser.add_argument("--estimates", action="store_true", help="estimate again, and keep the compiler's figures")
    args = parser.parse_args()
    if args.estimates:
        pairs = zip(report.last_rows("memory_estimate"), cases(), strict=True)
        report.publish(_report([estimated_again(row, case) for row, case in tqdm(pairs, unit="case")]))
        return
    rows: list[dict[str, Any]] = report.last_rows("memory_estimate") if args.goes_on else []
    for case in tqdm(cases()[len(rows) :], unit="case"):
        rows.append(measure(*case))
        report.write(_report(rows))
    report.publish(_report(rows))


def _report(rows: list[dict[str, Any]]) -> report.Report:
    errors = [abs(row["error"]) for row in rows]
    targets = (report.Target("mean error", fmean(errors), LIMIT), report.Target("largest error", max(errors), 0.2))
    return report.Report("memory_estimate", "Peak of a training step, estimated and by a v5e's compiler", rows, targets)


if __name__ == "__main__":
    main()
