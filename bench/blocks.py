"""`python -m bench.blocks`: what compiling equal layers once costs and saves, by the compiler of a v5e.

transformers' Llama of width 1024 with its loss, B 4, S 512, a training step at level balanced. No time here is measured
on a chip, see `bench.compared`. A row is a number of layers, with the option `blocks`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.workloads import Workload

WIDTH, INTERMEDIATE, NUM_HEADS, NUM_KEY_HEADS, NUM_TOKENS = 1024, 2816, 16, 8, 8192
BATCH, LENGTH = 4, 512
FEW, SEVERAL, MANY = 4, 8, 32
CASES: tuple[tuple[int, str | int], ...] = (
    (FEW, "on"), (SEVERAL, "off"), (SEVERAL, "on"), (SEVERAL, 2), (SEVERAL, 4), (MANY, "on"), (MANY, "auto"),
)  # fmt: skip
LIMIT_OF_DEPTH, LIMIT_OF_MODELLED, LIMIT_OF_CYCLES = 1.2, 1.00, 1.05
TITLE = (
    f"A training step of a Llama of width {WIDTH}, B {BATCH}, S {LENGTH}, by a v5e's compiler "
    "(estimates; no chip ran this)"
)


class LlamaLoss(nn.Module):
    """Tokens [B, S] int64 -> the mean loss of the next tokens. `width` scales the whole model."""

    def __init__(self, num_layers: int, width: int = WIDTH) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=width, intermediate_size=width * INTERMEDIATE // WIDTH, num_hidden_layers=num_layers,
            num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KEY_HEADS, vocab_size=NUM_TOKENS * width // WIDTH,
            use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def workload(num_layers: int) -> Workload:
    """On the meta device."""
    with torch.device("meta"):
        return Workload(LlamaLoss(num_layers), (torch.empty(BATCH, LENGTH, dtype=torch.int64),))


def measure(num_layers: int, blocks: str | int) -> dict[str, Any]:
    made = workload(num_layers)
    found = kp_dynamo.aot_compile(made.model, made.inputs, target="v5e", train=True, options={"blocks": blocks})
    return {
        "layers": num_layers,
        "blocks": blocks,
        "programs": len(found.programs),
        "libtpu CPU s": found.tpu_compile_s,
        "cycles ms": found.estimated_ms,
        "modelled ms": found.modelled_ms,
        "peak MiB": found.step_peak_bytes / 2**20,
        "unknown": len(found.unknown),
    }


def targets(rows: list[dict[str, Any]]) -> tuple[report.Target, ...]:
    """The targets whose two rows are measured."""
    by_case = {(row["layers"], row["blocks"]): row for row in rows}
    compared = (
        ("libtpu CPU s", (MANY, "on"), (FEW, "on"), LIMIT_OF_DEPTH),
        *(("modelled ms", (SEVERAL, blocks), (SEVERAL, "off"), LIMIT_OF_MODELLED) for blocks in ("on", 2, 4)),
        *(("cycles ms", (SEVERAL, blocks), (SEVERAL, "off"), LIMIT_OF_CYCLES) for blocks in ("on", 2, 4)),
    )
    return tuple(
        report.Target(f"{figure}: {_text(a)} over {_text(b)}", by_case[a][figure] / by_case[b][figure], limit)
        for figure, a, b, limit in compared
        if a in by_case and b in by_case
    )


def _text(case: tuple[int, str | int]) -> str:
    return f"{case[0]} layers {case[1]}"


def _place(row: dict[str, Any]) -> int:
    return CASES.index((row["layers"], row["blocks"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.blocks", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", help="measure only these; other rows are the last run's")
    chosen = parser.parse_args().layers
    rows = [] if chosen is None else [row for row in report.last_rows("blocks") if row["layers"] not in chosen]
    for num_layers, blocks in tqdm([c for c in CASES if chosen is None or c[0] in chosen], unit="compile"):
        rows = sorted([*rows, measure(num_layers, blocks)], key=_place)
        report.write(report.Report("blocks", TITLE, rows, targets(rows)))
    report.publish(report.Report("blocks", TITLE, rows, targets(rows)))


if __name__ == "__main__":
    main()
