"""`python -m bench.kernels`: models as users have them with a flash attention kernel, by a v5e's compiler.

The compiler gives no cycles for a kernel, so its calls count with their roofline: a lower bound. The rows without it
are those of `bench.v5e`.
"""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.compared import figures
from bench.v5e import LEVEL
from bench.v5e_workloads import BY_NAME

# The other models have a mask, dropout or a bias in their attention, or lengths that are no multiples of 128.
MODELS = (
    "Llama, V 32000",
    "Llama, V 128256, B 4, S 1024",
    "Qwen3",
    "GPT-2, B 2, S 1024",
    "GPT-2, no dropout",
    "UNet block, B 2, 64 x 64",
    "DiT, B 8",
)
TITLE = "Models of transformers and diffusers with a flash attention kernel, by a v5e's compiler (no chip ran this)"
_CALLS = "roofline of calls ms"
COMPARED = ("cycles ms", "modelled ms", "peak MiB")


def measure(model: str, mode: str) -> dict[str, Any] | None:
    """A row, beside the figures without the kernel; None if the kernel fits no attention of the model."""
    case, train = BY_NAME[model], mode == "train"
    options = {"level": LEVEL, "extra_passes": [kp_dynamo.FlashAttention()], **dict(case.options)}
    found = figures(case.workload(train), train, LEVEL, options)
    if not found[_CALLS]:
        return None
    base = report.last_row("v5e", model=model, mode=mode, variant=LEVEL) or dict.fromkeys(COMPARED)
    without = {f"{name} without": base[name] for name in COMPARED}
    return {"model": model, "mode": mode, **{name: found[name] for name in (*COMPARED, _CALLS)}, **without}


def main() -> None:
    cases = [(model, mode) for model in MODELS for mode in BY_NAME[model].modes]
    rows = [row for case in tqdm(cases, unit="case") if (row := measure(*case)) is not None]
    report.publish(report.Report("kernels", TITLE, rows, ()))


if __name__ == "__main__":
    main()
