"""`XLAOptimizations`: prepares a model for a chip, and sets how it is compiled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from kp_dynamo.api.environment import checked_config
from kp_dynamo.api.models import checked_model
from kp_dynamo.api.spmd_config import SPMDConfig
from kp_dynamo.api.xla_compiler import HINTS
from kp_dynamo.api.xla_device_manager import XLADeviceManager
from kp_dynamo.api.xla_distributed_training import XLADistributedTraining
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.exceptions import TPUOptimizationError


class XLAOptimizations:
    """Prepares models for the chip that a TPUConfig selects. What is no module raises TPUModelPreparationError."""

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)

    def optimize_model_for_xla(self, model: nn.Module) -> nn.Module:
        """Make the non-contiguous parameters on the CPU contiguous, in place, and return `model`.

        A transfer copies parameters with their strides. A parameter that shares its memory is left alone, because it
        would be untied. Nothing is padded or cast, because that changes results: `validate_tpu_model` reports sizes and
        dtypes that are slow on the chip.
        """
        module = checked_model(model)
        tensors = [*module.parameters(), *module.buffers()]
        # Only storages on the CPU show aliasing.
        on_cpu = [t for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]
        num_tensors = Counter(t.untyped_storage()._cdata for t in on_cpu)
        with torch.no_grad():
            for t in on_cpu:
                is_alone = num_tensors[t.untyped_storage()._cdata] == 1
                if isinstance(t, nn.Parameter) and is_alone and not t.is_contiguous():
                    t.set_(t.contiguous())  # type: ignore[call-overload]  # mypy expects a storage
        return model

    def add_compilation_hints(self, model: nn.Module, **options: Any) -> nn.Module:
        """Make `XLACompiler` and `TPUOptimizer` compile `model` with these options. Returns `model`.

        They take precedence over the configuration; the level of a call takes precedence over theirs. Without
        arguments, the hints follow from the model: no checkpointing if no parameter requires a gradient.

        Raises:
            TPUConfigurationError: An unknown option, or a bad value.
        """
        module = checked_model(model)
        CompileOptions.from_dict(options)
        is_trained = any(p.requires_grad for p in module.parameters())
        hinted = options or ({} if is_trained else {"checkpoint": "off"})
        HINTS.setdefault(module, {}).setdefault("options", {}).update(hinted)
        return model

    def enable_dynamic_shapes(self, model: nn.Module) -> nn.Module:
        """Make `XLACompiler` and `TPUOptimizer` capture `model` once for all shapes. Returns `model`.

        XLA still compiles a program per shape, but Dynamo and AOTAutograd run only once.

        Raises:
            TPUOptimizationError: The configuration has `enable_xla_dynamic_shapes=False`.
        """
        if not self.config.enable_xla_dynamic_shapes:
            raise TPUOptimizationError("the configuration has enable_xla_dynamic_shapes=False. Try: set it to True.")
        HINTS.setdefault(checked_model(model), {})["dynamic"] = True
        return model


def create_xla_integration(
    tpu_config: TPUConfig, spmd_config: SPMDConfig | None = None
) -> tuple[XLADeviceManager, XLADistributedTraining, XLAOptimizations]:
    """Create the three XLA classes for one configuration; raises what `XLADeviceManager` raises.

    `spmd_config` is the mesh of `XLADistributedTraining`, and needs `topology=POD`.
    """
    devices = XLADeviceManager(tpu_config)
    return devices, XLADistributedTraining(devices, spmd_config), XLAOptimizations(tpu_config)
