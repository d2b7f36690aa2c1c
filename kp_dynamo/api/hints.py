"""Compilation hints for a single model, in addition to the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


@dataclass
class Hints:
    """For one model: options that win over the configuration, and whether one capture serves all shapes."""

    options: dict[str, Any] = field(default_factory=dict)
    is_dynamic: bool = False


_hints: WeakKeyDictionary[nn.Module, Hints] = WeakKeyDictionary()


def hints_of(model: nn.Module) -> Hints:
    """The hints of `model`, to read or to change."""
    return _hints.setdefault(model, Hints())


def with_hints(model: nn.Module, arguments: dict[str, Any], level: str | None = None) -> dict[str, Any]:
    """The arguments of `torch.compile` with the hints of `model` applied; `level` takes precedence over both."""
    hints = hints_of(model)
    options = {**arguments["options"], **hints.options, **({} if level is None else {"level": level})}
    return {**arguments, "dynamic": hints.is_dynamic or arguments["dynamic"], "options": options}
