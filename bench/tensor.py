"""`python -m bench.tensor`: what the passes for meshes make of tensor parallelism, by a v5e's compiler.

transformers' Llama with 7 billion parameters, one sequence of 2048 tokens a chip, with its heads along `model`. No chip
runs it: `aot_compile` models the times. A row takes one to three minutes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tqdm import tqdm

import kp_dynamo
from bench import report
from bench.fsdp import LENGTH, LLAMA_7B
from bench.published import Loss

MESHES = ({"data": 2, "model": 4}, {"data": 4, "model": 4})
WAYS = {
    "by XLA": ["divide_heads", "gather_weights"],
    "`divide_heads`": ["gather_weights"],
    "and `gather_weights`": [],
}
"""What our passes do -> the passes that are disabled."""
TITLE = (
    "Llama 7B in training with fsdp+tensor on v5e, one sequence a chip, as its compiler models it (no chip ran this)"
)


def measured(mesh: dict[str, int], way: str) -> dict[str, Any]:
    """A row."""
    chips = mesh["data"] * mesh["model"]
    with torch.device("meta"):
        model, tokens = Loss(LLAMA_7B, LENGTH), torch.empty(chips, LENGTH, dtype=torch.long)
    options: dict[str, Any] = {"level": "aggressive", "checkpoint": "blocks", "blocks": "on"}
    options |= {"extra_passes": [kp_dynamo.FlashAttention()], "disable_passes": WAYS[way]}
    how: dict[str, Any] = {"target": "v5e", "chips": chips, "mesh": mesh, "sharding": "fsdp+tensor", "train": True}
    found = kp_dynamo.aot_compile(model, (tokens,), options=options, **how)
    return {
        "chips": chips,
        "mesh": ",".join(f"{axis}={size}" for axis, size in mesh.items()),
        "passes": way,
        "step ms": found.step_ms,
        "links ms": sum(row.link_ms for row in found.collectives),
        "exposed ms": found.exposed_ms,
        "peak GB": found.step_peak_bytes / 1e9,
    }


def main() -> None:
    argparse.ArgumentParser(prog="bench.tensor", description=__doc__).parse_args()
    cases = [(mesh, way) for mesh in MESHES for way in WAYS]
    report.publish(report.Report("tensor", TITLE, [measured(*case) for case in tqdm(cases, unit="row")]))


if __name__ == "__main__":
    main()
