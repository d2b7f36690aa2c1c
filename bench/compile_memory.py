"""Peak memory of compiling and first calling a model of 1 GiB, above the memory in use before.

The first call also runs the program. In bfloat16, XLA:CPU then converts weights and keeps those of many layers
at once. These are temporaries of the program, not of the compilation; the float32 rows show the compilation alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench import report, timing
from bench.variants import EAGER, KP_TPU, KP_TPU_FLOAT32, OPENXLA, VARIANTS, settle

WIDTH, NUM_LAYERS, NUM_ROWS = 4096, 16, 16384
NARROW = 64
NUM_RUNS = 5
LIMIT_OF_COPIES = 0.05
MIB = 2**20


class TableMlp(nn.Module):
    """Gathers rows of a large argument, so that a copy of the argument shows, as a copy of a parameter does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, table: Tensor, rows: Tensor) -> Tensor:
        x = table[rows]
        for layer in self.layers:
            x = layer(x).relu()
        return x


def measure(variant: str, width: int) -> dict[str, float]:
    """MiB held in parameters and arguments, and MiB that the peak of compile and first call lies above the start."""
    chosen = VARIANTS[variant]
    device = chosen.device()
    model, table = _filled(width, device)
    rows = torch.arange(8, device=device)
    settle()
    held = sum(t.numel() * t.element_size() for t in (table, *model.parameters()))
    step = chosen.compiled(model)
    _forget_peak()
    before = _status_mib("VmRSS")
    with torch.no_grad():
        timing.finish(step(table, rows))
    return {"held_mib": held / MIB, "grown_mib": _status_mib("VmHWM") - before}


def _filled(width: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    """The model and its table, created on the device, so that no copy is left on the CPU."""
    with torch.device("meta"):
        model = TableMlp(width)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1 / width)
    return model.eval(), torch.ones(NUM_ROWS, width, device=device)


def _forget_peak() -> None:
    """Set the peak (VmHWM) of this process back to its present size; Linux, see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_mib(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) / 1024


def main() -> None:
    rows: list[dict[str, Any]] = []
    for variant in (EAGER, OPENXLA, KP_TPU, KP_TPU_FLOAT32):
        cases = [{"variant": variant.name, "width": width} for width in (NARROW, WIDTH)]
        narrow, wide = timing.medians_of_processes("bench.compile_memory", cases, NUM_RUNS)
        copies = (wide["grown_mib"] - narrow["grown_mib"]) / wide["held_mib"]
        rows.append(
            {
                "variant": variant.name,
                "parameters and arguments MiB": wide["held_mib"],
                "peak above them MiB": wide["grown_mib"],
                f"peak above them at width {NARROW} MiB": narrow["grown_mib"],
                "copies of parameters and arguments": copies,
            }
        )
    copies_in_float32 = rows[-1]["copies of parameters and arguments"]
    name = f"{KP_TPU_FLOAT32.name}: copies of parameters and arguments"
    target = report.Target(name, copies_in_float32, LIMIT_OF_COPIES)
    title = (
        f"Memory of a compile and first call, {NUM_LAYERS} layers of width {WIDTH} (medians of {NUM_RUNS} processes)"
    )
    report.publish(report.Report("compile_memory", title, rows, (target,)))


if __name__ == "__main__":
    main()
