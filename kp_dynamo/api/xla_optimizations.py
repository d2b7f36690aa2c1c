"""`XLAOptimizations`: prepares a model for a chip, with only those changes that keep results bitwise equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kp_dynamo.api.environment import checked_config
from kp_dynamo.api.hints import hints_of
from kp_dynamo.api.models import checked_model
from kp_dynamo.api.validation_rules import ValidationReport, check_model
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.exceptions import TPUOptimizationError


class XLAOptimizations:
    """Prepares models for the chip that a TPUConfig selects. What is no module raises TPUModelPreparationError."""

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        self._reports: WeakKeyDictionary[nn.Module, tuple[ValidationReport, ...]] = WeakKeyDictionary()

    def optimize_model_for_xla(self, model: nn.Module) -> nn.Module:
        """Apply in place the changes that keep results equal, and record the others for `report`. Returns `model`.

        Applied: non-contiguous parameters on the CPU become contiguous, because a transfer copies them with their
        strides. Refused: making a parameter contiguous that shares its memory, which would untie it; padding layers to
        the chip's tiles, which changes their shapes, the state dict and the order of sums; casting dtypes that the
        chip computes in software, which changes values.
        """
        module = checked_model(model)
        refused = [found for found in check_model(module, self.config) if found.status != "passed"]
        self._reports[module] = (*_made_contiguous(module), *refused)
        return model

    def report(self, model: nn.Module) -> tuple[ValidationReport, ...]:
        """The changes that `optimize_model_for_xla` applied to `model` ("passed") and refused (warnings).

        Sizes and dtypes are the findings of `validate_tpu_model`.

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


def _made_contiguous(module: nn.Module) -> Iterator[ValidationReport]:
    """Make parameters contiguous whose storage, which shows aliasing only on the CPU, holds no other tensor."""
    sharing: dict[int, list[str]] = defaultdict(list)
    on_cpu = [
        (name, tensor)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if tensor.device.type == "cpu" and tensor.layout is torch.strided
    ]
    for name, tensor in on_cpu:
        sharing[tensor.untyped_storage()._cdata].append(name)
    for name, tensor in on_cpu:
        if not isinstance(tensor, nn.Parameter) or tensor.is_contiguous():
            continue
        if others := [other for other in sharing[tensor.untyped_storage()._cdata] if other != name]:
            reason = f"not contiguous: it shares its memory with {', '.join(others)} and would be untied"
            yield ValidationReport(f"layout {name}", "warning", reason)
            continue
        with torch.no_grad():
            tensor.set_(tensor.contiguous())  # type: ignore[call-overload]  # mypy expects a storage
        yield ValidationReport(f"layout {name}", "passed", "made contiguous")
