"""Logs: everything under `logging.getLogger("kp_dynamo")`; warnings only, unless asked for more.

* `TORCH_LOGS="+kp_dynamo"` writes everything as text, as torch does for its own loggers; `TORCH_LOGS="kp_dynamo"`
  leaves the details out.
* `KP_TPU_LOG=json` writes one JSON object a line on stderr, at the level that TORCH_LOGS sets, else from INFO.
* `TORCH_TRACE=folder` gets the graphs before and after the passes, where tlparse shows them.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Any

from torch import fx
from torch._logging._internal import _is_torch_handler, trace_structured

from kp_dynamo.exceptions import TPUConfigurationError

ROOT = logging.getLogger("kp_dynamo")

# Attributes of every record; what goes beyond them was given as `extra`.
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
    """Set the loggers up as the environment says now. Called for every graph, as `torch._logging.set_logs` undoes it.

    Raises:
        TPUConfigurationError: KP_TPU_LOG is neither empty nor "json".
    """
    wanted = os.environ.get("KP_TPU_LOG", "")
    if wanted not in ("", "json"):
        raise TPUConfigurationError(f"KP_TPU_LOG={wanted!r} is not known; allowed: json; leave it unset for text")
    if wanted == "json":
        _speak_json()
    if any(map(_is_ours, ROOT.handlers)):
        # Python's root logger, which torch_xla gives a handler, would write every line a second time.
        ROOT.propagate = False


def _speak_json() -> None:
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
    """Set by us, or by torch for TORCH_LOGS; all others are the user's and stay as they are."""
    return isinstance(handler.formatter, JsonFormatter) or _is_torch_handler(handler)


def trace_graph(gm: fx.GraphModule, name: str) -> None:
    """Give a graph to torch's structured trace; costs nothing unless TORCH_TRACE is set."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"kp_tpu_{name}", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False, include_stride=True),
        expect_trace_id=False,
    )
