"""An explanation as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from kp_dynamo.explanation.reports import (
    CaptureReport,
    Explanation,
    FallbackReport,
    GraphBreak,
    GraphReport,
    PassOnGraph,
)

T = TypeVar("T")

_MAX_REFUSALS = 5  # of one pass in one graph; `to_dict` holds all


def text_of(explanation: Explanation) -> str:
    """Graph breaks, captures, passes, graphs, operators on the CPU and seconds, a section each."""
    e = explanation
    return "\n".join(
        [
            *_section("graph breaks", e.graph_breaks, _break_lines),
            *_section("graphs captured by Dynamo", e.captures, _capture_lines),
            *_section("passes", e.passes, _pass_lines),
            *_section("graphs lowered", e.graphs, _graph_lines),
            f"XLA programs: {e.num_programs}",
            f"compile cache: {e.num_hits} hits, {e.num_misses} misses",
            *_section("operators on the CPU", e.fallbacks, _fallback_lines),
            f"seconds: {_seconds(e.seconds)}",
        ]
    )


def _section(title: str, items: Sequence[T], lines: Callable[[T], Iterator[str]]) -> Iterator[str]:
    yield f"{title}: {len(items) or 'none'}"
    for item in items:
        yield from (f"  {line}" for line in lines(item))


def _break_lines(graph_break: GraphBreak) -> Iterator[str]:
    yield f"{graph_break.line or 'at an unknown line'}: {graph_break.reason.splitlines()[0]}"
    if graph_break.source:
        yield f"  {graph_break.source}"


def _capture_lines(capture: CaptureReport) -> Iterator[str]:
    name = "equal to an earlier one" if capture.number is None else str(capture.number)
    yield f"{name}: {_looked_up(capture.key, capture.is_hit, capture.why_missed)}, {capture.seconds:.2f} s"


def _pass_lines(done: PassOnGraph) -> Iterator[str]:
    yield f"{done.graph} {done.name}: rewrote {done.rewritten}, refused {len(done.refused)}"
    yield from (f"  {note}" for note in done.notes)
    for node, reason in done.refused[:_MAX_REFUSALS]:
        yield f"  refused {node}: {reason}"
    if len(done.refused) > _MAX_REFUSALS:
        yield f"  and {len(done.refused) - _MAX_REFUSALS} more"


def _graph_lines(graph: GraphReport) -> Iterator[str]:
    made = f"{_counted(graph.num_operators, 'operator')}, {_counted(graph.num_programs, 'program')}"
    yield f"{graph.name}: {made}, {_seconds(graph.seconds)}"
    yield f"  {_looked_up(graph.key, graph.is_hit, graph.why_missed)}"
    if graph.casts:
        yield f"  casts: {', '.join(f'{count} x {pair}' for pair, count in graph.casts.items())}"


def _fallback_lines(fallback: FallbackReport) -> Iterator[str]:
    where = f" at {fallback.line}" if fallback.line else ""
    yield f"{fallback.graph} {fallback.op}{where}: {fallback.moved_bytes} bytes moved"


def _looked_up(key: str, is_hit: bool, why_missed: str) -> str:
    return f"key {key or 'none'}, {'in the cache' if is_hit else f'not in the cache: {why_missed}'}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _seconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items()) or "no time"
