"""`TPUOptimizer`: compiles a model at a level and measures the result."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kp_dynamo.api.comparison import difference, milliseconds
from kp_dynamo.api.models import SampleInputs, checked_model
from kp_dynamo.api.spmd_config import SPMDConfig
from kp_dynamo.api.tpu_backend import TPUBackend
from kp_dynamo.api.validation import ValidationSummary, require_valid, validate_tpu_model
from kp_dynamo.api.xla_compiler import arguments_for
from kp_dynamo.api.xla_device_manager import XLADeviceManager
from kp_dynamo.api.xla_distributed_training import XLADistributedTraining
from kp_dynamo.compat import chips
from kp_dynamo.config.tpu_config import KernelPyTorchConfig
from kp_dynamo.config.translation import LEVEL_OF_NUMBER
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.telemetry.counters import TELEMETRY


@dataclass(frozen=True)
class TPUOptimizationResult:
    """The result of `TPUOptimizer.optimize`, which describes the metrics; the time is in seconds, with measurements."""

    optimized_model: nn.Module
    optimization_time: float
    performance_metrics: dict[str, Any]
    optimization_level: str
    validation: ValidationSummary


class TPUOptimizer:
    """Compiles models at a level and measures them; a `TPUBackend` with this configuration is its `backend`.

    With an `spmd_config`, which needs `topology=POD`, each model is first moved to the devices and divided, in place.
    """

    def __init__(self, config: KernelPyTorchConfig | None = None, spmd_config: SPMDConfig | None = None) -> None:
        self.backend = TPUBackend(config)
        self.compiler = self.backend.compiler
        self._levels: Counter[str] = Counter()
        self._distributed = spmd_config and XLADistributedTraining(
            XLADeviceManager(self.config.hardware.tpu), spmd_config
        )

    @property
    def config(self) -> KernelPyTorchConfig:
        """The configuration of the backend; changes take effect at the next call."""
        return self.backend.config

    @config.setter
    def config(self, value: KernelPyTorchConfig) -> None:
        self.backend.config = value

    def optimize(
        self, model: nn.Module, sample_inputs: Any = None, optimization_level: str | None = None
    ) -> TPUOptimizationResult:
        """Compile `model` in its current mode.

        Args:
            model: As for `XLACompiler.compile_model`.
            sample_inputs: As for `XLACompiler.compile_model`; the model is measured with them.
            optimization_level: "conservative", "balanced" or "aggressive"; None: that of a hint
                (`XLAOptimizations.add_compilation_hints`), else of the configuration.

        Returns:
            The compiled model and, with sample inputs, its figures: "compile_s", "num_programs", "device",
            "ms_per_call" and "eager_ms_per_call" (including the backward in training mode), and "relative_difference"
            of "results" and "gradients" from eager, None if the model is random.

        Raises:
            TPUConfigurationError: An unknown level.
            TPUValidationError: The model cannot be called with the sample inputs, or strict validation warns.
            TPUBackendError: Whatever `XLACompiler.compile_model` raises.
        """
        if optimization_level is not None and optimization_level not in LEVEL_OF_NUMBER:
            raise TPUConfigurationError(
                f"Unknown optimization level {optimization_level!r}. Allowed: {', '.join(LEVEL_OF_NUMBER)}."
            )
        return self._optimized(self.compiler.compile_model, model, sample_inputs, optimization_level)

    def optimize_for_inference(self, model: nn.Module, sample_inputs: Any = None) -> TPUOptimizationResult:
        """`optimize` in eval mode, without gradients, at the level of a hint or the configuration."""
        checked_model(model).eval()
        with torch.no_grad():
            return self._optimized(self.compiler.optimize_for_inference, model, sample_inputs)

    def optimize_for_training(self, model: nn.Module, sample_inputs: Any = None) -> TPUOptimizationResult:
        """`optimize` in training mode, at the level of a hint or the configuration."""
        return self._optimized(self.compiler.compile_model, checked_model(model).train(), sample_inputs)

    def get_optimization_stats(self) -> dict[str, Any]:
        """Number of optimized models, their levels, and the statistics of the compiler."""
        return {
            "total_optimizations": self._levels.total(),
            "by_level": dict(self._levels),
            "compilation": self.compiler.get_compilation_stats(),
        }

    def clear_cache(self) -> None:
        """Drop the compiled models; see `XLACompiler.clear_cache`."""
        self.compiler.clear_cache()

    def _optimized(
        self, compile_model: Callable[..., nn.Module], model: nn.Module, sample_inputs: Any, wanted: str | None = None
    ) -> TPUOptimizationResult:
        start, module, config = time.perf_counter(), checked_model(model), self.config.hardware.tpu
        level = arguments_for(module, config, wanted)["options"]["level"]
        validation = validate_tpu_model(module, config, sample_inputs)
        require_valid(validation, is_strict=False)
        if self._distributed:
            self._distributed.wrap_model(module)
        metrics: dict[str, Any] = {}
        num_programs, compile_start = TELEMETRY.counts["programs"], time.perf_counter()
        compiled = compile_model(module, sample_inputs, level=level)
        if sample_inputs is not None:
            metrics["num_programs"] = TELEMETRY.counts["programs"] - num_programs
            metrics["compile_s"] = time.perf_counter() - compile_start
            inputs = SampleInputs.of(sample_inputs)
            results, gradients = difference(module, compiled, inputs) or (None, None)
            metrics["relative_difference"] = {"results": results, "gradients": gradients}
            metrics["device"] = chips.device_kind()
            metrics["ms_per_call"] = milliseconds(module, compiled, inputs)
            metrics["eager_ms_per_call"] = milliseconds(module, module, inputs)
        self._levels[level] += 1
        return TPUOptimizationResult(compiled, time.perf_counter() - start, metrics, level, validation)
