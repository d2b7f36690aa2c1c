"""`python -m bench.fsdp`: how much of the communication of "fsdp" a v5e's compiler leaves exposed.

transformers' Llama with 7 billion parameters, one sequence of 2048 tokens a chip, on one host (8 chips) and on a square
slice (16 chips), with gathers by XLA and by `gather_weights`, with the flags of docs/sharding.md, and with gradients
that are exchanged. No chip runs it: `aot_compile` models the times. A row takes about a minute.
"""

from __future__ import annotations

import argparse
import os
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.published import Loss
from bench.published_runs import Sizes

LLAMA_7B = Sizes(width=4096, mlp=11008, heads=32, key_heads=32, layers=32, vocabulary=32000)
LENGTH = 2048
CHIPS = (8, 16)
_ALL_REDUCES = (
    "--xla_enable_async_all_reduce=true --xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true"
)
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "by XLA": ({"disable_passes": ["gather_weights"]}, ""),
    "in the program": ({}, ""),
    "and asynchronous all-reduces": ({}, _ALL_REDUCES),
    "and all-to-alls": (
        {"reduce_scatter": "all_to_all"},
        f"{_ALL_REDUCES} --xla_tpu_enable_async_all_to_all=true",
    ),
}
"""How weights are gathered and gradients summed -> options, and the flags of libtpu."""
DTYPES = {"float32": None, "bfloat16": "bfloat16"}
"""The gradients are summed in it -> the option `reduce_dtype`."""
MOST_EXPOSED = 0.15
TITLE = "Llama 7B in training with fsdp on v5e, one sequence a chip, as its compiler models it (no chip ran this)"


def compiled(chips: int, way: str, dtype: str) -> kp_dynamo.AotReport:
    """A training step as the compiler sees it."""
    with torch.device("meta"):
        model, tokens = Loss(LLAMA_7B, LENGTH), torch.empty(chips, LENGTH, dtype=torch.long)
    options: dict[str, Any] = {"level": "aggressive", "checkpoint": "blocks", "blocks": "on"}
    given, flags = WAYS[way]
    options |= {"extra_passes": [kp_dynamo.FlashAttention()], "reduce_dtype": DTYPES[dtype], **given}
    how: dict[str, Any] = {"target": "v5e", "chips": chips, "sharding": "fsdp", "train": True}
    with mock.patch.dict(os.environ, {"LIBTPU_INIT_ARGS": flags}):
        return kp_dynamo.aot_compile(model, (tokens,), options=options, **how)


def measured(chips: int, way: str, dtype: str) -> dict[str, Any]:
    """A row."""
    found = compiled(chips, way, dtype)
    return {
        "chips": chips,
        "gathers": way,
        "gradients": dtype,
        "step ms": found.step_ms,
        "links ms": sum(row.link_ms for row in found.collectives),
        "exposed ms": found.exposed_ms,
        "exposed share": found.exposed_ms / found.step_ms,
        "peak GB": found.step_peak_bytes / 1e9,
    }


def main() -> None:
    argparse.ArgumentParser(prog="bench.fsdp", description=__doc__).parse_args()
    cases = [(chips, way, dtype) for chips in CHIPS for way in WAYS for dtype in DTYPES]
    rows = [measured(*case) for case in tqdm(cases, unit="row")]
    least = {chips: min(row["exposed share"] for row in rows if row["chips"] == chips) for chips in CHIPS}
    targets = [report.Target(f"exposed share of a step, {n} chips", share, MOST_EXPOSED) for n, share in least.items()]
    report.publish(report.Report("fsdp", TITLE, rows, tuple(targets)))


if __name__ == "__main__":
    main()
