"""Compilation hints for a single model, in addition to the configuration."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from kp_dynamo.config.options import CompileOptions

_hints: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
_dynamic: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def add_hints(model: nn.Module, options: dict[str, Any]) -> None:
    """Compile `model` with these options, which take precedence over the configuration.

    Raises:
        TPUConfigurationError: They are not valid.
    """
    CompileOptions.from_dict(options)
    _hints[model] = {**_hints.get(model, {}), **options}


def make_dynamic(model: nn.Module) -> None:
    """Compile `model` with `dynamic=True`: one capture for all lengths."""
    _dynamic[model] = True


def level_of(model: nn.Module) -> str | None:
    """The level of the model's hints; None if they set none."""
    return _hints.get(model, {}).get("level")


def with_hints(model: nn.Module, arguments: dict[str, Any], level: str | None = None) -> dict[str, Any]:
    """The arguments of `torch.compile` with the hints of `model` applied; `level` takes precedence over both."""
    dynamic = True if model in _dynamic else arguments["dynamic"]
    options = {**arguments["options"], **_hints.get(model, {})}
    return {**arguments, "dynamic": dynamic, "options": options if level is None else {**options, "level": level}}
