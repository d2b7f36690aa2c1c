"""Add a session's events to torch's structured trace, where tlparse shows them beside the graphs of their compilation.

`explain` adds its whole report; these parts of it are there for every compilation.
"""

from __future__ import annotations

from typing import Any

from kp_dynamo.runtime.events import CaptureDivided, CaptureReady, Event, GraphTransformed, ProgramReady
from kp_dynamo.telemetry.log import trace_json


def trace_event(event: Event) -> None:
    """Add one event as an artifact in JSON; free unless TORCH_TRACE is set."""
    match event:
        case CaptureReady():
            number = "cached" if event.number is None else event.number
            trace_json(f"{number}.capture", lambda: _capture(event))
        case CaptureDivided():
            trace_json("blocks", lambda: {"pieces": [p._asdict() for p in event.pieces], "whole_because": event.reason})
        case GraphTransformed():
            trace_json(f"{event.label}.passes", lambda: _passes(event))
        case ProgramReady():
            trace_json(f"{event.label}.program", lambda: _program(event))


def _capture(event: CaptureReady) -> dict[str, Any]:
    return {"is_hit": event.number is None, "seconds": event.seconds, "inputs": event.input_names}


def _passes(event: GraphTransformed) -> dict[str, Any]:
    return {"seconds": event.seconds, "passes": [report.to_dict() for report in event.reports]}


def _program(event: ProgramReady) -> dict[str, Any]:
    executable = event.executable
    return {
        "is_hit": event.is_hit,
        "is_cacheable": event.is_cacheable,
        "programs": executable.num_programs,
        "seconds": executable.seconds,
        "on_cpu": [{"op": op, "line": line} for op, line in executable.fallbacks],
        "donated_arguments": sorted(executable.donated),
        "not_donated": [{"argument": position, "reason": reason} for position, reason in executable.kept],
    }
