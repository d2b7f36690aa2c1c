"""Turns the events of a session into reports."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from kp_dynamo.cache.compile_key import CompileKey
from kp_dynamo.cache.input_changes import input_changes
from kp_dynamo.cache.key_diff import explain_miss
from kp_dynamo.explanation.graph_reports import (
    CaptureReport,
    DivisionReport,
    FallbackReport,
    GraphReport,
    PassOnGraph,
    PieceReport,
)
from kp_dynamo.graph.nodes import calls, tensor_of
from kp_dynamo.graph.places import modules_at
from kp_dynamo.runtime.events import CaptureDivided, CaptureReady, Event, GraphTransformed, ProgramReady


class Recorder:
    """Records the events of a session.

    Args:
        captures: Keys of captures that count as cached.
        programs: Keys of programs that count as cached.
    """

    def __init__(self, captures: Iterable[CompileKey], programs: Iterable[CompileKey]) -> None:
        self._captures, self._programs = _Known(captures), _Known(programs)
        self._ready: list[tuple[ProgramReady, bool, str]] = []
        self._spent: Counter[str] = Counter()  # seconds in the stages below AOTAutograd, by number of the capture
        self._seconds = {"aot": 0.0, "passes": 0.0}
        self.captures: list[CaptureReport] = []
        self.divisions: list[DivisionReport] = []
        self.passes: list[PassOnGraph] = []

    def __call__(self, event: Event) -> None:
        """Record one event."""
        match event:
            case CaptureReady():
                self._capture(event)
            case CaptureDivided():
                pieces = tuple(PieceReport(*piece) for piece in event.pieces)
                self.divisions.append(DivisionReport(pieces, event.reason))
            case GraphTransformed():
                self._transformed(event)
            case ProgramReady():
                self._program(event)

    def graphs(self) -> list[GraphReport]:
        """The graphs so far, with current times and programs: the parts of a split graph compile on their first run."""
        return [_graph_report(*ready) for ready in self._ready]

    def programs(self) -> list[ProgramReady]:
        """The programs so far."""
        return [event for event, _, _ in self._ready]

    def fallbacks(self) -> list[FallbackReport]:
        """The CPU fallbacks so far."""
        made = [event for event, _, _ in self._ready if not event.is_hit]
        return [
            FallbackReport(
                event.label, op, line, event.executable.moved_bytes[op, line], modules_at(event.gm.graph, op, line)
            )
            for event in made
            for op, line in dict.fromkeys(event.executable.fallbacks)
        ]

    def seconds(self) -> dict[str, float]:
        """Time spent so far, by stage: "aot", "passes", "trace", "xla"."""
        graphs = self.graphs()
        return {
            **self._seconds,
            **{stage: sum(g.seconds.get(stage, 0.0) for g in graphs) for stage in ("trace", "xla")},
        }

    def _capture(self, event: CaptureReady) -> None:
        changes = self._captures.changes(event.key, event.input_names)
        is_hit, why_missed = self._captures.look_up(event.key)
        self.captures.append(
            CaptureReport(event.number, _digest(event.key), is_hit, why_missed, event.seconds, changes)
        )
        self._seconds["aot"] += event.seconds - self._spent[str(event.number)]

    def _transformed(self, event: GraphTransformed) -> None:
        shown = {done.name for done in self.passes if done.example is not None}  # one of each pass is enough
        self.passes += [
            PassOnGraph(
                event.label, r.name, r.rewritten, r.refused, r.notes, r.places, r.errors,
                None if r.name in shown else r.example,
            )
            for r in event.reports
        ]  # fmt: skip
        self._seconds["passes"] += event.seconds
        self._spend(event.label, event.seconds)

    def _program(self, event: ProgramReady) -> None:
        self._ready.append((event, *self._programs.look_up(event.key if event.is_cacheable else None)))
        if not event.is_hit:
            self._spend(event.label, sum(event.executable.seconds.values()))

    def _spend(self, label: str, seconds: float) -> None:
        self._spent[label.split(".")[0]] += seconds  # type: ignore[assignment]  # a Counter adds floats as well


class _Known:
    """Keys that count as cached; a key that was looked up counts from then on."""

    def __init__(self, keys: Iterable[CompileKey]) -> None:
        self._keys = dict.fromkeys(keys)

    def look_up(self, key: CompileKey | None) -> tuple[bool, str]:
        """Whether `key` is known, and if not, why not."""
        if key is None:
            return False, "it has no stable key"
        if key in self._keys:
            return True, ""
        why = explain_miss(key, self._keys)
        self._keys[key] = None
        return False, why

    def changes(self, key: CompileKey | None, names: Sequence[str]) -> tuple[str, ...]:
        """The inputs that differ from the nearest capture of the same operators; () if `key` is known."""
        return () if key is None or key in self._keys else input_changes(key, self._keys, names)


def _digest(key: CompileKey | None) -> str:
    return "" if key is None else hashlib.blake2b(repr(key.parts).encode(), digest_size=8).hexdigest()


def _graph_report(event: ProgramReady, is_hit: bool, why_missed: str) -> GraphReport:
    return GraphReport(
        name=event.label,
        key=_digest(event.key if event.is_cacheable else None),
        is_hit=is_hit,
        why_missed=why_missed,
        num_operators=sum(n.op == "call_function" for n in event.gm.graph.nodes),
        casts=casts_of(event.gm.graph),
        num_programs=0 if event.is_hit else event.executable.num_programs,
        seconds={} if event.is_hit else dict(event.executable.seconds),
    )


def casts_of(graph: fx.Graph) -> dict[str, int]:
    """Number of dtype casts in a graph, by "float32 -> bfloat16"."""
    casts = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
    pairs = ((tensor_of(node.args[0]), tensor_of(node)) for node in calls(graph, *casts))
    return dict(
        Counter(_between(a.dtype, b.dtype) for a, b in pairs if a is not None and b is not None and a.dtype != b.dtype)
    )


def _between(source: torch.dtype, result: torch.dtype) -> str:
    return f"{source} -> {result}".replace("torch.", "")
