"""What a stored capture saves: the first training step of models in new processes, on XLA's CPU plugin.

Usage: python -m tests.disk_cache.measure_captures [MODEL ...] [--runs N]. Prints a line of JSON for each process, then
a table of the medians, in CPU seconds. "programs" is the cache of XLA's programs alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.disk_cache.process import HERE, build, build_library, finish, plugin_folder, start_script
from tests.disk_cache.test_enable import ON_THE_PLUGIN, PRELUDE

STEP = """
import time
folder, mode = os.environ["TEST_FOLDER"], os.environ["TEST_MODE"]
if folder:
    kp_dynamo.enable_disk_cache(folder)
import torch, torch_xla
if mode == "programs":
    from kp_dynamo.disk_cache import captures
    from kp_dynamo.session import session
    captures.folder = session.disk_folder = lambda: None
from tests.disk_cache.measure_captures import MODELS
torch.manual_seed(0)
make, options = MODELS[os.environ["TEST_MODEL"]]
model, inputs = make()
model.to("xla").train()
inputs = [x.to("xla") for x in inputs]
run = torch.compile(lambda *x: model(*x), backend="kp_tpu", options={"precision": "float32", **options})
torch_xla.sync(wait=True)
cpu, wall = time.process_time(), time.perf_counter()
result = run(*inputs)
result.square().mean().backward()
torch_xla.sync(wait=True)
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
stats = kp_dynamo.cache_stats()["disk"]
shown = {name: stats.get(name) for name in ("misses", "captures", "load_s", "compile_s")}
print(json.dumps({"cpu_s": cpu, "wall_s": wall, "sum": result.sum().item(), **shown}))
"""


def _t5():
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0))

        def forward(self, tokens):
            return self.model(input_ids=tokens, labels=tokens).loss

    return Loss(), (torch.randint(1000, (2, 32)),)


def _resnet():
    import timm
    import torch

    return timm.create_model("resnet50"), (torch.randn(2, 3, 64, 64),)


def _llama():
    from bench import workloads

    workload = workloads.llama(32)
    return workload.model, workload.inputs


MODELS = {
    "t5": (_t5, {}),
    "resnet50": (_resnet, {}),
    "llama": (_llama, {"blocks": "off"}),
    "llama-blocks": (_llama, {"blocks": "on"}),
}
COLUMNS = "no cache", "first, programs", "second, programs", "first, captures", "second, captures"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.disk_cache.measure_captures", description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        library = build_library(Path(place) / "library.so")
        front = build(Path(place) / "front.so", HERE / "front_plugin.c")
        lines = [_line(name, arguments.runs, library, front) for name in arguments.models]
    sys.stdout.write("\n".join(["| model | " + " | ".join(COLUMNS) + " |", "|---" * 6 + "|", *lines]) + "\n")


def _line(model: str, runs: int, library: Path, front: Path) -> str:
    found = [_processes(model, library, front) for _ in range(runs)]
    medians = (statistics.median(run[column] for run in found) for column in COLUMNS)
    return f"| {model} | " + " | ".join(f"{value:.2f}" for value in medians) + " |"


def _processes(model: str, library: Path, front: Path) -> dict[str, float]:
    """The CPU seconds of the first step in each kind of process."""
    folder = plugin_folder()
    assert folder is not None, "XLA's CPU plugin is not installed"
    fixed = {
        "PJRT_DEVICE": "CPUP", "KP_TPU_CACHE_TRIAL": "1", "TEST_MODEL": model, "TEST_LIBRARY": str(library),
        "TEST_FRONT": str(front), "KP_TEST_PLUGIN": str(folder / "xla_cpu_pjrt.so"),
    }  # fmt: skip
    seconds = {}
    with tempfile.TemporaryDirectory() as place:
        for column in COLUMNS:
            mode = column.split()[-1]
            used = Path(place) / mode
            used.mkdir(mode=0o700, exist_ok=True)
            chosen = {"TEST_MODE": mode, "TEST_FOLDER": "" if mode == "cache" else str(used)}
            told = finish(start_script(PRELUDE + ON_THE_PLUGIN + STEP, {**fixed, **chosen}), timeout_s=900)
            sys.stdout.write(json.dumps({"model": model, "process": column, **told}) + "\n")
            sys.stdout.flush()
            seconds[column] = told["cpu_s"]
    return seconds


if __name__ == "__main__":
    main()
