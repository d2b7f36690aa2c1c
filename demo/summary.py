"""What the backend did, as text, and the loss as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

from demo.speed import Speed
from kp_dynamo.explanation.graph_reports import pass_from_dict
from kp_dynamo.explanation.pass_text import pass_lines
from kp_dynamo.explanation.text_layout import wrapped

mpl.use("Agg")
from matplotlib import pyplot as plt


def what_was_done(counted: dict[str, Any], cache: dict[str, Any], verbose: bool = False) -> str:
    """From `kp_dynamo.telemetry.counters.snapshot()` and `kp_dynamo.cache_stats()`.

    `verbose` shows every pass on every graph.
    """
    fallbacks = ", ".join(f"{op} x{count}" for op, count in counted["fallbacks"].items())
    seconds = ", ".join(f"{stage} {value:.1f} s" for stage, value in counted["seconds"].items())
    captures = cache["captures"]
    lines = [
        f"graphs           {counted['graphs']}, from {counted['aot_traces']} runs of AOTAutograd",
        f"programs         {counted['programs']} compiled by XLA",
        f"cache            {captures['hits']} whole captures found again, {cache['hits']} programs; "
        f"{cache['size']} of {cache['max_size']} entries used, {cache['evictions']} evicted",
        f"CPU fallbacks    {fallbacks or 'none'}",
        f"seconds          {seconds}",
        *pass_lines([pass_from_dict(done) for done in counted["passes"]], verbose),
    ]
    return wrapped(lines)


def speed_table(speeds: dict[str, Speed], ours: str) -> str:
    """One line a variant, with the ratio of ours to it."""
    lines = [f"{'':<10} {'first step s':>12} {'ms per step':>12} {ours + ' / this':>15}"]
    for name, speed in speeds.items():
        ratio = speeds[ours].step_ms / speed.step_ms
        lines.append(f"{name:<10} {speed.first_s:>12.1f} {speed.step_ms:>12.0f} {ratio:>15.2f}")
    return "\n".join(lines)


def draw_losses(losses: list[float], eager: list[float], path: Path) -> None:
    """The loss curve, with the first steps of eager marked on it, as PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="kp_tpu")
    axes.plot(range(1, len(eager) + 1), eager, "o", markersize=4, fillstyle="none", color="black", label="eager")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="A byte-level GPT on the standard library's sources")
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
