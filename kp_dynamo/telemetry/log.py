"""Logging under `logging.getLogger("kp_dynamo")`; only warnings by default.

* `TORCH_LOGS="+kp_dynamo"` logs everything as text, as for torch's own loggers; `TORCH_LOGS="kp_dynamo"` omits debug
  messages.
* `KP_TPU_LOG=json` writes one JSON object per line to stderr, at the level of TORCH_LOGS, else INFO.
* `TORCH_TRACE=folder` records the graphs before and after the passes, reports, and stages of compiling, for tlparse.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

from torch import fx
from torch._logging._internal import _is_torch_handler, trace_structured

from kp_dynamo.exceptions import TPUConfigurationError

ROOT = logging.getLogger("kp_dynamo")

# Attributes of every record; any others come from `extra`.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, logger, message, its `extra` fields, the exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _USUAL},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure() -> None:
    """Configure the loggers from the environment.

    Called at the import of the package, and for every graph, because `torch._logging.set_logs` undoes it.

    Raises:
        TPUConfigurationError: KP_TPU_LOG is neither empty nor "json".
    """
    wanted = os.environ.get("KP_TPU_LOG", "")
    if wanted not in ("", "json"):
        raise TPUConfigurationError(f"KP_TPU_LOG={wanted!r} is invalid. Allowed: json. Try: unset it for text logs.")
    if wanted == "json":
        _use_json()
    if any(map(_is_ours, ROOT.handlers)):
        # torch_xla adds a handler to Python's root logger, which would log every line twice.
        ROOT.propagate = False


def _use_json() -> None:
    if not any(map(_is_ours, ROOT.handlers)):
        ROOT.addHandler(_stderr_handler())
    for handler in filter(_is_ours, ROOT.handlers):
        handler.setFormatter(JsonFormatter())
    if ROOT.level == logging.NOTSET:
        ROOT.setLevel(logging.INFO)


def _stderr_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    return handler


def _is_ours(handler: logging.Handler) -> bool:
    """Whether this package set the handler, or torch did for TORCH_LOGS; all others are the user's."""
    return isinstance(handler.formatter, JsonFormatter) or _is_torch_handler(handler)


def trace_graph(gm: fx.GraphModule, name: str) -> None:
    """Add a graph to torch's structured trace; free unless TORCH_TRACE is set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"kp_tpu_{name}", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False, include_stride=True),
        expect_trace_id=False,
    )


def trace_json(name: str, content: Callable[[], Any]) -> None:
    """Add values to torch's structured trace as JSON; `content` is called only if TORCH_TRACE is set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"kp_tpu_{name}", "encoding": "json"},
        payload_fn=lambda: json.dumps(content(), default=str),
        expect_trace_id=False,
    )


class Report(Protocol):
    """A report for people and for programs."""

    def text(self, verbose: bool = False) -> str:
        """The report to read."""

    def to_dict(self) -> dict[str, Any]:
        """The report as values for JSON."""


def trace_report(name: str, report: Report) -> None:
    """Add a report to torch's structured trace, as text and as JSON; free unless TORCH_TRACE is set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"kp_tpu_{name}_report", "encoding": "string"},
        payload_fn=lambda: report.text(verbose=True),
        expect_trace_id=False,
    )
    trace_json(f"{name}_values", report.to_dict)
