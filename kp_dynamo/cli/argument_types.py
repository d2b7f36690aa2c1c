"""What arguments of commands may be."""

from __future__ import annotations

import argparse
import json
from typing import Any

from kp_dynamo.exceptions import TPUConfigurationError


def seconds(text: str) -> float:
    """A number of seconds."""
    return _positive(text, "number of seconds")


def ratio(text: str) -> float:
    """A ratio, such as 1.02."""
    return _positive(text, "ratio")


def _positive(text: str, what: str) -> float:
    if not text.replace(".", "", 1).isdigit() or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what} > 0")
    return float(text)


def options(text: str) -> dict[str, Any]:
    """Options of `torch.compile` as a JSON object, in which "flash_attention" names the pass `FlashAttention()`."""
    found = _json_object(text)
    passes = found.get("extra_passes")
    return {**found, "extra_passes": [_pass_of(name) for name in passes]} if isinstance(passes, list) else found


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _pass_of(name: Any) -> Any:
    from kp_dynamo.pipeline.optional_passes import OPTIONAL_PASSES  # imports torch, and most commands name no pass

    if not isinstance(name, str) or name not in OPTIONAL_PASSES:
        raise argparse.ArgumentTypeError(
            f"extra_passes names {name!r}, which is no pass of kp_dynamo that is off by default. Allowed on the "
            f"command line: {', '.join(map(repr, OPTIONAL_PASSES))}. A pass of your own needs Python: aot_compile, "
            "explain or plan."
        )
    return OPTIONAL_PASSES[name]()


def numbers(text: str) -> tuple[int, ...]:
    """Numbers of chips, such as "4,16,64".

    Raises:
        TPUConfigurationError: A part is no number.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise TPUConfigurationError(f"chips={text!r} is invalid. Allowed: numbers, such as 4,16,64.")
    return tuple(int(part) for part in parts)


def sharding(text: str) -> Any:
    """A word, or rules as a JSON object."""
    return _json_object(text) if text.lstrip().startswith("{") else text


def share(text: str) -> float:
    """A part of a whole, such as 0.05."""
    if not text.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no number >= 0, such as 0.05")
    return float(text)
