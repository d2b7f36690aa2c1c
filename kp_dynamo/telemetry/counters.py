"""Counters of what the backend did in this process."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Telemetry:
    """Counters of one process; its methods are thread-safe."""

    counts: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    passes: list[dict[str, Any]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter: "graphs", "programs", "aot_traces", ..."""
        with self._lock:
            self.counts[name] += by

    def count_fallback(self, op: str, num_bytes: int) -> None:
        """Count one run of `op` on the CPU, and the bytes copied for it."""
        with self._lock:
            self.fallbacks[op] += 1
            self.counts["fallback_bytes"] += num_bytes

    def spent(self, stage: str, seconds: float) -> None:
        """Add to the time of a stage: "aot_and_below", "passes", "trace", "xla"."""
        with self._lock:
            self.seconds[stage] += seconds

    def passed(self, graph: str, report: dict[str, Any]) -> None:
        """Record what a pass did to a graph, in the form of `PassReport.to_dict`."""
        with self._lock:
            self.passes.append({"graph": graph, **report})

    def reset(self) -> None:
        """Reset all counters."""
        with self._lock:
            for kept in (self.counts, self.fallbacks, self.seconds, self.passes):
                kept.clear()


TELEMETRY = Telemetry()


def snapshot() -> dict[str, Any]:
    """Counters of this process that tests and reports compare, as plain, JSON-serializable values.

    `operators_compiled` is left out: only the time budget reads it.
    """
    with TELEMETRY._lock:
        return {
            "captures": TELEMETRY.counts["captures"],
            "uncompiled_frames": TELEMETRY.counts["uncompiled_frames"],
            "graphs": TELEMETRY.counts["graphs"],
            "programs": TELEMETRY.counts["programs"],
            "aot_traces": TELEMETRY.counts["aot_traces"],
            "bucket_refusals": TELEMETRY.counts["bucket_refusals"],
            "exact_lengths": TELEMETRY.counts["exact_lengths"],
            "donated_buffers": TELEMETRY.counts["donated_buffers"],
            "copied_before_donation": TELEMETRY.counts["copied_before_donation"],
            "fallbacks": dict(TELEMETRY.fallbacks),
            "fallback_bytes": TELEMETRY.counts["fallback_bytes"],
            "seconds": {stage: round(value, 6) for stage, value in TELEMETRY.seconds.items()},
            "passes": [dict(report) for report in TELEMETRY.passes],
        }
