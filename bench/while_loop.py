"""`python -m bench.while_loop`: equal layers as one program, as a program that runs for each layer, as a While loop.

Inference in bfloat16 by a v5e's compiler, see `bench.compared`: no chip ran this. The loop calls the program of the
layer that `blocks="on"` makes, with slices of weights (and caches) [N, ...]. A PyTorch model has N separate tensors, so
the last variant stacks them in the program.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.layer_stack import WORKLOADS, workload
from bench.loop_cost import cost_of_loop
from kp_dynamo.aot.compiler import TpuCompiler
from kp_dynamo.aot.peak_bytes import peak_bytes
from kp_dynamo.aot.request import Machine, request_of
from kp_dynamo.aot.trace_programs import call_on_fakes
from kp_dynamo.explanation.run_once import fresh_dynamo
from kp_dynamo.hardware import CHIPS
from kp_dynamo.lowering.fake_run import ExportedProgram
from kp_dynamo.runtime.events import ignore

NUM_LAYERS = (8, 32)
TARGET = "v5e"
MIB = 2**20
TITLE = "Equal Llama layers of width 1024 in inference, by a v5e's compiler (estimates; no chip ran this)"
Figures = dict[str, float]


def compiled(blocks: str, model: str, num_layers: int) -> Figures:
    """Through the backend, with the option `blocks`."""
    made = workload(model, num_layers)
    found = kp_dynamo.aot_compile(made.model, made.inputs, target=TARGET, options={"blocks": blocks})
    programs = sum(p.runs for p in found.programs)
    return _figures(programs, found.estimated_ms, found.modelled_ms, found.step_peak_bytes, found.tpu_compile_s)


def loop(is_stacked: bool, model: str, num_layers: int) -> Figures:
    """One While loop over the program of a layer."""
    from bench.scan import scan_layers

    carried, *shared = (tuple(t.shape) for t in workload(model, num_layers).inputs[:3])
    layer = layer_program(model, num_layers).stablehlo
    program = scan_layers(layer, num_layers, carried, shared, is_stacked=is_stacked)
    with TpuCompiler(TARGET) as compiler:
        compiler.submit(program)
        made = compiler.result()
    cost = cost_of_loop(made.hlo, num_layers, CHIPS[TARGET])
    cycles_ms = cost.cycles / CHIPS[TARGET].clock_hz * 1e3
    return _figures(1, cycles_ms, cost.modelled_s * 1e3, peak_bytes(made), made.seconds)


def layer_program(model: str, num_layers: int) -> ExportedProgram:
    """The program that `blocks="on"` makes of a layer."""
    made, programs = workload(model, num_layers), list[ExportedProgram]()
    request = request_of(made.model, made.inputs, Machine(TARGET), {"blocks": "on"}, "kp_tpu", False)
    with fresh_dynamo(), torch.set_grad_enabled(False):
        call_on_fakes(request, programs.append, ignore)
    [layer] = programs
    return layer


def _figures(runs: int, cycles_ms: float, modelled_ms: float, peak_bytes: float, compile_s: float) -> Figures:
    return {
        "runs of programs": runs,
        "cycles ms": cycles_ms,
        "modelled ms": modelled_ms,
        "peak MiB": peak_bytes / MIB,
        "libtpu CPU s": compile_s,
    }


VARIANTS: dict[str, Callable[[str, int], Figures]] = {
    "whole": partial(compiled, "off"),
    "a program for each layer": partial(compiled, "on"),
    "loop, stacked before": partial(loop, True),
    "loop, stacked in the program": partial(loop, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.while_loop", description=__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="measure only these; others are the last run's")
    parser.add_argument("--layers", nargs="+", type=int, default=NUM_LAYERS)
    args = parser.parse_args()
    cases = [(m, n, v) for m in WORKLOADS for n in args.layers for v in args.variants or VARIANTS]
    rows = [row for row in report.last_rows("while_loop") if _case(row) not in cases]
    for model, num_layers, variant in tqdm(cases, unit="compile"):
        figures = VARIANTS[variant](model, num_layers)
        rows.append({"model": model, "layers": num_layers, "variant": variant, **figures})
        rows.sort(key=_place)
        report.write(report.Report("while_loop", TITLE, rows))
    report.publish(report.Report("while_loop", TITLE, rows))


def _case(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["model"], row["layers"], row["variant"]


def _place(row: dict[str, Any]) -> tuple[int, int, int]:
    return list(WORKLOADS).index(row["model"]), row["layers"], list(VARIANTS).index(row["variant"])


if __name__ == "__main__":
    main()
