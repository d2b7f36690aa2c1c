"""`python -m bench.published`: training steps whose time was published, compiled ahead of time at their configuration.

Nothing is measured here. A row has the time of the published run and the time that `aot_compile` models, to which the
optimizer is added. docs/planner.md compares them. A run takes one to five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any
from unittest import mock

import torch
from torch import nn
from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.published_runs import RUNS, PublishedRun, Sizes
from kp_dynamo.exceptions import XLACompilationError
from kp_dynamo.hardware import CHIPS

TITLE = "Published training steps, and what the compiler makes of the same configurations (no chip ran this)"
_OPTIMIZER_BYTES = 4 * (4 + 3)
"""AdamW reads a parameter, its gradient and two moments, and writes a parameter and two moments, all in float32."""


SUMS = "bfloat16"
"""The dtype in which chips sum."""


class Loss(nn.Module):
    """A causal language model of transformers, of which only the loss is returned."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=sizes.width,
                intermediate_size=sizes.mlp,
                num_attention_heads=sizes.heads,
                num_key_value_heads=sizes.key_heads,
                head_dim=sizes.head_width,
                num_hidden_layers=sizes.layers,
                vocab_size=sizes.vocabulary,
                max_position_embeddings=length,
                tie_word_embeddings=False,
                use_cache=False,
            )
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def compiled(run: PublishedRun) -> kp_dynamo.AotReport:
    """A run as the TPU compiler sees it."""
    with torch.device("meta"):
        model, tokens = Loss(run.sizes, run.length), torch.empty(run.batch * run.chips, run.length, dtype=torch.long)
    mesh = {"data": run.chips // run.tensor, **({"model": run.tensor} if run.tensor > 1 else {})}
    kernel = [kp_dynamo.FlashAttention()]
    options = {"level": "aggressive", "blocks": "on", "checkpoint": run.checkpoint, "extra_passes": kernel}
    # MaxText computes in bfloat16 with float32 parameters: it gathers bfloat16 weights, and so sums their gradients.
    options |= {"reduce_dtype": SUMS}
    sharding = "fsdp+tensor" if run.tensor > 1 else "fsdp"
    how: dict[str, Any] = {"target": run.target, "chips": run.chips, "mesh": mesh, "sharding": sharding}
    with mock.patch.dict(os.environ, {"LIBTPU_INIT_ARGS": run.flags}):
        return kp_dynamo.aot_compile(model, (tokens,), options=options, train=True, **how)


def measured(run: PublishedRun) -> dict[str, Any]:
    """A row. What the compiler refuses has no time, and the reason."""
    row: dict[str, Any] = {"run": run.name, "published s": run.seconds}
    start = time.perf_counter()
    try:
        found = compiled(run)
    except XLACompilationError as problem:
        return {**row, "predicted s": None, "failed": str(problem).split(". ")[0][:200]}
    optimizer_s = run.sizes.num_parameters * _OPTIMIZER_BYTES / run.chips / CHIPS[run.target].hbm_bytes_per_s
    return {
        **row,
        "sums": SUMS,
        "predicted s": found.step_ms / 1e3 + optimizer_s,
        "exposed s": found.exposed_ms / 1e3,
        "calls s": found.custom_call_ms / 1e3,
        "peak GB": found.step_peak_bytes / 1e9,
        "compile s": found.seconds["tpu"],
        "total s": time.perf_counter() - start,
    }


def keep(row: dict[str, Any]) -> None:
    """Write a row, and keep those of other runs."""
    order = {run.name: i for i, run in enumerate(RUNS)}
    rows = [r for r in report.last_rows("published") if r["run"] != row["run"] and r["run"] in order]
    content = {"name": "published", "title": TITLE, "rows": sorted([*rows, row], key=lambda r: order[r["run"]])}
    report.RESULTS.mkdir(exist_ok=True)
    (report.RESULTS / "published.json").write_text(
        json.dumps({**content, "environment": report.environment()}, indent=1) + "\n"
    )


def main() -> None:
    names = [run.name for run in RUNS]
    parser = argparse.ArgumentParser(prog="bench.published", description=__doc__)
    parser.add_argument("runs", nargs="*", choices=[*names, []], help="by default all of them", metavar="RUN")
    asked = parser.parse_args().runs or names
    for run in tqdm([run for run in RUNS if run.name in asked], unit="run"):
        keep(measured(run))
    print(f"\n{TITLE}\n\n{report.table(report.last_rows('published'))}\n")


if __name__ == "__main__":
    main()
