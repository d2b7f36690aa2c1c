"""`XLAOptimizations`: prepares a model for a chip, with only those changes that keep results bitwise equal."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kp_dynamo.api.environment import checked_config, deciding_chip
from kp_dynamo.api.hints import hints_of
from kp_dynamo.api.models import checked_model
from kp_dynamo.api.tiles import off_tile_sizes
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.exceptions import TPUOptimizationError


@dataclass(frozen=True)
class Change:
    """What a chip would benefit from at the module or parameter `path`, and why it was not applied, if it was not."""

    path: str
    what: str
    is_applied: bool
    reason: str = ""


class XLAOptimizations:
    """Prepares models for the chip that a TPUConfig selects."""

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        self._reports: WeakKeyDictionary[nn.Module, tuple[Change, ...]] = WeakKeyDictionary()

    def optimize_model_for_xla(self, model: nn.Module) -> nn.Module:
        """Apply in place the changes that keep results equal, and record the others for `report`. Returns `model`.

        Applied: non-contiguous parameters on the CPU become contiguous, because a transfer copies them with their
        strides. Refused: making a parameter contiguous that shares its memory, which would untie it; padding layers to
        the chip's tiles, which changes their shapes, the state dict and the order of sums; casting dtypes that the
        chip computes in software, which changes values. Dropout with probability 0 is kept: its probability may be
        read, or raised later.

        Raises:
            TPUModelPreparationError: It is not a module.
        """
        module = checked_model(model)
        self._reports[module] = (*_made_contiguous(module), *self._refused(module))
        return model

    def report(self, model: nn.Module) -> tuple[Change, ...]:
        """The changes that `optimize_model_for_xla` applied to `model` or refused.

        Raises:
            TPUOptimizationError: `optimize_model_for_xla` was not called for this model.
        """
        module = checked_model(model)
        if module not in self._reports:
            raise TPUOptimizationError("this model has no report. Try: call optimize_model_for_xla(model) first.")
        return self._reports[module]

    def add_compilation_hints(self, model: nn.Module, **options: Any) -> nn.Module:
        """Make `XLACompiler` and `TPUOptimizer` compile `model` with these options. Returns `model`.

        They take precedence over the configuration; the level of a call takes precedence over theirs. Without
        arguments, the hints follow from the model: no checkpointing if no parameter requires a gradient.

        Raises:
            TPUConfigurationError: An unknown option, or a bad value.
        """
        hints = hints_of(checked_model(model))
        CompileOptions.from_dict(options)
        is_trained = any(p.requires_grad for p in model.parameters())
        hints.options.update(options or ({} if is_trained else {"checkpoint": "off"}))
        return model

    def enable_dynamic_shapes(self, model: nn.Module) -> nn.Module:
        """Make `XLACompiler` and `TPUOptimizer` capture `model` once for all shapes. Returns `model`.

        XLA still compiles a program per shape, but Dynamo and AOTAutograd run only once.

        Raises:
            TPUOptimizationError: The configuration has `enable_xla_dynamic_shapes=False`.
        """
        if not self.config.enable_xla_dynamic_shapes:
            raise TPUOptimizationError("the configuration has enable_xla_dynamic_shapes=False. Try: set it to True.")
        hints_of(checked_model(model)).is_dynamic = True
        return model

    def _refused(self, module: nn.Module) -> list[Change]:
        chip = deciding_chip(self.config)
        padded = [
            Change(path, f"pad to the tiles of a {chip.name} ({text}; it computes {ratio:.2f} times as much)", False,
                   "its parameters, the state dict and the order of sums would change; choose other sizes")
            for path, text, ratio in off_tile_sizes(module, chip)
        ]  # fmt: skip
        wide = [
            Change(name, "float64 is computed in software", False, "values would change; call model.float()")
            for name, p in module.named_parameters()
            if p.dtype == torch.float64
        ]
        return padded + wide


def _made_contiguous(module: nn.Module) -> list[Change]:
    sharing: dict[int, list[str]] = defaultdict(list)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if _is_on_cpu(tensor):
            sharing[tensor.untyped_storage()._cdata].append(name)
    changes = []
    for name, parameter in module.named_parameters():
        if not _is_on_cpu(parameter) or parameter.is_contiguous():
            continue
        if others := [other for other in sharing[parameter.untyped_storage()._cdata] if other != name]:
            reason = f"it shares its memory with {', '.join(others)} and would be untied"
            changes.append(Change(name, "lay out contiguously", False, reason))
            continue
        with torch.no_grad():
            parameter.set_(parameter.contiguous())  # type: ignore[call-overload]  # mypy expects a storage
        changes.append(Change(name, "lay out contiguously", True))
    return changes


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense and on the CPU, where its storage shows aliasing."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
