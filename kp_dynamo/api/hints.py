"""What is known of one model beyond the configuration, for whoever compiles it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from kp_dynamo.config.options import CompileOptions

_hints: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
_dynamic: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def add_hints(model: nn.Module, options: dict[str, Any]) -> None:
    """Have `model` compiled with these options, which win over those of a configuration.

    Raises:
        TPUConfigurationError: They are not valid.
    """
    CompileOptions.from_dict(options)
    _hints[model] = {**_hints.get(model, {}), **options}


def make_dynamic(model: nn.Module) -> None:
    """Have `model` compiled with `dynamic=True`: captured once for all lengths."""
    _dynamic[model] = True


def level_of(model: nn.Module) -> str | None:
    """The level that a hint says; None where none does."""
    return _hints.get(model, {}).get("level")


def with_hints(model: nn.Module, arguments: dict[str, Any], level: str | None = None) -> dict[str, Any]:
    """The arguments of `torch.compile`, changed by what is known of `model`; `level`, a call's own, wins over both."""
    dynamic = True if model in _dynamic else arguments["dynamic"]
    options = {**arguments["options"], **_hints.get(model, {})}
    return {**arguments, "dynamic": dynamic, "options": options if level is None else {**options, "level": level}}
