"""Log a session's events; the `extra` fields of the records make the JSON form."""

from __future__ import annotations

import logging

from kp_dynamo.runtime.event_trace import trace_event
from kp_dynamo.runtime.events import CaptureDivided, CaptureReady, Event, GraphTransformed, ProgramReady

logger = logging.getLogger(__name__)


def log_event(event: Event) -> None:
    """Log one event, newly compiled programs and notes of passes at INFO, everything else at DEBUG; and trace it."""
    trace_event(event)
    match event:
        case CaptureReady(number=None):
            logger.debug("capture cache hit: nothing is traced", extra={"event": "capture", "is_hit": True})
        case CaptureReady(is_loaded=True):
            text = "capture %s was loaded from the disk cache in %.3f s"
            logger.info(text, event.number, event.seconds, extra=_capture_fields(event))
        case CaptureReady():
            logger.debug("capture %s took %.3f s", event.number, event.seconds, extra=_capture_fields(event))
        case CaptureDivided():
            _log_division(event)
        case GraphTransformed():
            _log_passes(event)
        case ProgramReady():
            _log_program(event)


def _capture_fields(event: CaptureReady) -> dict[str, object]:
    fields = {"event": "capture", "is_hit": False, "number": event.number, "seconds": event.seconds}
    return {**fields, "is_loaded": True} if event.is_loaded else fields


def _log_division(event: CaptureDivided) -> None:
    fields = {"event": "blocks", "runs": [piece.runs for piece in event.pieces], "reason": event.reason}
    if event.pieces:
        logger.info("%d pieces run %s times", len(event.pieces), fields["runs"], extra=fields)
    else:
        logger.debug("compiled as a whole: %s", event.reason, extra=fields)


def _log_passes(event: GraphTransformed) -> None:
    for report in event.reports:
        fields = {"graph": event.label, "pass": report.name, "rewritten": report.rewritten, "refused": report.refused}
        text = "%s: %s rewrote %d, refused %s"
        logger.debug(text, *fields.values(), extra={"event": "pass", **fields, "notes": report.notes})
        for note in report.notes:
            logger.info("%s: %s: %s", event.label, report.name, note)


def _log_program(event: ProgramReady) -> None:
    programs, seconds = event.executable.num_programs, event.executable.seconds
    fields = {"event": "program", "graph": event.label, "is_hit": event.is_hit, "programs": programs}
    if event.is_hit:
        logger.debug("%s: shares the program of an equal graph", event.label, extra=fields)
    else:
        spent = ", ".join(f"{stage} {value:.3f} s" for stage, value in seconds.items())
        logger.info(
            "%s: XLA programs: %d, %s", event.label, programs, spent, extra={**fields, "seconds": dict(seconds)}
        )
