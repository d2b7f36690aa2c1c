"""The counters in Prometheus's text format, version 0.0.4: what a page that Prometheus reads answers with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kp_dynamo.telemetry.counters import TELEMETRY

_PREFIX = "kp_tpu_"

# The counters without labels, and their help.
COUNTERS = {
    "captures": "Graphs that Dynamo captured.",
    "uncompiled_frames": "Functions that Dynamo gave up, which run eagerly.",
    "graphs": "ATen graphs that were lowered or found in the cache.",
    "programs": "XLA programs that were compiled.",
    "operators_compiled": "Operators in the graphs that were compiled.",
    "aot_traces": "Captures that AOTAutograd traced.",
    "bucket_refusals": "Graphs whose lengths are not padded, because an operator has no rule for it.",
    "exact_lengths": "Calls with a length that was not padded.",
    "donated_buffers": "Buffers of inputs that were reused for results.",
    "copied_before_donation": "Tensors that were copied because they shared a donated buffer.",
    "fallback_bytes": "Bytes copied to and from the CPU for operators without an XLA lowering.",
    "hang_warnings": "Warnings of kp_dynamo.watch that no program ended.",
    "slow_steps": "Slow steps that kp_dynamo.watch warned of.",
}
_FALLBACKS = "Runs of an operator on the CPU, because it has no XLA lowering."
_SECONDS = "Seconds of compiling by stage; aot_and_below includes passes, trace and xla of what it compiles."
_REWRITTEN = "Matches that a pass rewrote."
_REFUSED = "Matches that a pass refused to rewrite."


def prometheus_text() -> str:
    """The counters of this process in Prometheus's text format (`text/plain; version=0.0.4`).

    All count from the start of the process, or from `TELEMETRY.reset()`. A metric with a label has a line for each
    value that occurred.
    """
    with TELEMETRY._lock:
        counts, fallbacks, seconds = dict(TELEMETRY.counts), dict(TELEMETRY.fallbacks), dict(TELEMETRY.seconds)
        passes = list(TELEMETRY.passes)
    rewritten, refused = Counter[str](), Counter[str]()
    for report in passes:
        rewritten[report["name"]] += report["rewritten"]
        refused[report["name"]] += len(report["refused"])
    metrics = [_metric(name, text, "", {"": counts.get(name, 0)}) for name, text in COUNTERS.items()]
    metrics += [
        _metric("fallbacks", _FALLBACKS, "op", fallbacks),
        _metric("compile_seconds", _SECONDS, "stage", seconds),
        _metric("pass_rewrites", _REWRITTEN, "pass", rewritten),
        _metric("pass_refusals", _REFUSED, "pass", refused),
    ]
    return "".join(metrics)


def _metric(name: str, text: str, label: str, values: Mapping[str, float]) -> str:
    """A counter with a line for each value of its label; a single line without labels if `label` is ""."""
    name = f"{_PREFIX}{name}_total"
    lines = [f"# HELP {name} {text}", f"# TYPE {name} counter"]
    for labelled, value in values.items():
        labels = f'{{{label}="{_escaped(labelled)}"}}' if label else ""
        lines.append(f"{name}{labels} {value}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
