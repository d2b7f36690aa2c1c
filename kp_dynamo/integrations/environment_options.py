"""Options for libraries that call `torch.compile` themselves: KP_TPU_OPTIONS, and over it those of a call."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from kp_dynamo.config import rules
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError

VARIABLE = "KP_TPU_OPTIONS"


def merged_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of KP_TPU_OPTIONS, overridden key by key by `options`.

    Raises:
        TPUConfigurationError: KP_TPU_OPTIONS is not a JSON object, or an option is unknown or has a bad value.
    """
    from_environment = _from_environment()
    _require_valid(from_environment, f"{VARIABLE}: ")
    CompileOptions.from_dict(options)
    return {**from_environment, **(options or {})}


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except ValueError as cause:
        raise _no_object(text, f"it is not JSON ({cause})") from cause
    if not isinstance(found, dict):
        raise _no_object(text, f"it is a JSON {type(found).__name__}")
    return found


def _no_object(text: str, reason: str) -> TPUConfigurationError:
    return TPUConfigurationError(
        f"{VARIABLE}={rules.short(text)} is invalid: {reason}. Allowed: a JSON object of options. "
        f"""Try: {VARIABLE}='{{"level": "balanced"}}'."""
    )


def _require_valid(options: dict[str, Any], where: str) -> None:
    """Check the options as the backend does, and name the place that they came from."""
    try:
        CompileOptions.from_dict(options)
    except TPUConfigurationError as cause:
        raise TPUConfigurationError(f"{where}{cause}") from cause
