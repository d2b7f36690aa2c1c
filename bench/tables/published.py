"""The table of published training steps beside the times that the TPU compiler models for them.

A modelled time is multiplied by one constant, which is taken from other runs: the median of published over modelled
time of all other runs of the generation, or of all generations if those are fewer than three.
"""

from __future__ import annotations

from itertools import combinations
from statistics import median

from bench.published_runs import RUNS, PublishedRun
from bench.tables.results import Results, load, markdown, text, with_caption

_NAMES = (
    "run", "batch of a chip, length", "mesh", "recomputed: theirs", "ours", "our sums", "published s", "modelled s",
    "predicted s", "error", "ours: GB a chip",
)  # fmt: skip
_FEWEST = 3
FLAT = "Llama 3.1 8B"
"""Its runs have about as many tokens a second of a chip on any slice."""
_FAR = 0.15
"""Runs of one generation that differ by more than this must be predicted in the right order."""


def published() -> str:
    """All runs, then what the errors are."""
    results = load("published")
    times = _times(results)
    failed = {row["run"]: row["failed"] for row in results.rows if row.get("failed")}
    memory = {row["run"]: row.get("peak GB") for row in results.rows}
    sums = {row["run"]: row.get("sums", "float32") for row in results.rows}
    known = [run for run in RUNS if run.name in times or run.name in failed]
    rows = [[*_line(run, times, failed, sums[run.name]), text(memory[run.name], ".0f")] for run in known]
    return with_caption(results, f"{markdown(_NAMES, rows)}\n\n{_summary(times)}")


def predictions(times: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The predicted seconds of each run, from the (published, modelled) seconds of all."""
    target = {run.name: run.target for run in RUNS}
    found = {}
    for name, (_, modelled) in times.items():
        others = {n: p / m for n, (p, m) in times.items() if n != name}
        of_target = [ratio for n, ratio in others.items() if target[n] == target[name]]
        found[name] = modelled * median(of_target if len(of_target) >= _FEWEST else others.values())
    return found


def _times(results: Results) -> dict[str, tuple[float, float]]:
    compiled = [row for row in results.rows if row["predicted s"] is not None]
    return {row["run"]: (row["published s"], row["predicted s"]) for row in compiled}


def _line(run: PublishedRun, times: dict[str, tuple[float, float]], failed: dict[str, str], sums: str) -> list[str]:
    mesh = f"data={run.chips // run.tensor}" + (f", model={run.tensor}" if run.tensor > 1 else "")
    cells = [run.name, f"{run.batch} x {run.length}", mesh, run.recomputed, run.checkpoint, sums]
    if run.name not in times:
        return [*cells, text(run.seconds, ".2f"), "", "", failed[run.name]]
    predicted = predictions(times)[run.name]
    seconds = (run.seconds, times[run.name][1], predicted)
    return [*cells, *(text(s, ".2f") for s in seconds), text(predicted / run.seconds - 1, "+.0%")]


def _summary(times: dict[str, tuple[float, float]]) -> str:
    predicted = predictions(times)
    errors = {name: abs(predicted[name] / seconds - 1) for name, (seconds, _) in times.items()}
    worst = max(errors, key=lambda name: errors[name])
    right, pairs = in_order({name: seconds for name, (seconds, _) in times.items()}, predicted)
    said = f"{len(errors)} runs: the median error is {median(errors.values()):.0%}, the largest {errors[worst]:.0%} "
    said += (
        f"({worst}). {right} of {pairs} pairs of one generation that differ by more than 15% are in the right order."
    )
    flat = [run for run in RUNS if run.model == FLAT and run.name in times]
    if flat:
        speeds = [run.batch * run.length / predicted[run.name] for run in flat]
        of_runs = [run.batch * run.length / run.seconds for run in flat]
        spread, theirs = (max(s) / min(s) - 1 for s in (speeds, of_runs))
        said += f" Tokens a second of a chip of {FLAT} on {len(flat)} slices are predicted within {spread:.0%} of each "
        said += f"other, and were within {theirs:.0%}."
    return said


def in_order(seconds: dict[str, float], predicted: dict[str, float]) -> tuple[int, int]:
    """How many pairs of runs of a generation are in the right order, of those that differ."""
    targets = {run.name: run.target for run in RUNS}
    pairs = [(a, b) for a, b in combinations(seconds, 2) if targets[a] == targets[b]]
    far = [(a, b) for a, b in pairs if max(seconds[a], seconds[b]) > (1 + _FAR) * min(seconds[a], seconds[b])]
    return sum((seconds[a] < seconds[b]) == (predicted[a] < predicted[b]) for a, b in far), len(far)
