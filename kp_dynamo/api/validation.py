"""Validates a configuration, and a model: its fit to the chip and the agreement of compiled and eager results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kp_dynamo.api.environment import checked_config
from kp_dynamo.api.models import SampleInputs, checked_model
from kp_dynamo.api.validation_rules import ValidationReport, check_config, check_model, check_run
from kp_dynamo.config.tpu_config import KernelPyTorchConfig, TPUConfig
from kp_dynamo.exceptions import TPUValidationError


@dataclass(frozen=True)
class ValidationSummary:
    """The results of a validation; `str()` is for people, `dataclasses.asdict` for JSON.

    Attributes:
        total_tests: Number of checks.
        warnings: Number of warnings: settings or sizes that work, but are costly or have no effect.
        success_rate: Share of checks that did not fail, 0 to 1.
        reports: The result of each check.
    """

    total_tests: int
    passed: int
    failed: int
    warnings: int
    success_rate: float
    reports: tuple[ValidationReport, ...]

    def __str__(self) -> str:
        return "\n".join(f"{report.status:7} {report.name}: {report.message}" for report in self.reports)


def validate_tpu_configuration(config: KernelPyTorchConfig | TPUConfig) -> ValidationSummary:
    """Check for settings that will raise, have no effect, or cost more than they gain. Starts no device.

    Raises:
        TPUConfigurationError: It is not a configuration.
        TPUValidationError: The configuration is strict, and a check did not pass.
    """
    tpu = config.hardware.tpu if isinstance(config, KernelPyTorchConfig) else checked_config(config)
    return _summary(check_config(tpu), tpu)


def validate_tpu_model(
    model: nn.Module, tpu_config: TPUConfig, sample_inputs: Any = None, *, run: bool = True
) -> ValidationSummary:
    """Check a model's memory, dtypes and sizes; with sample inputs, call it and compare compiled with eager.

    Sizes that do not fill the chip's tiles are warnings: the chip computes the padding too. The model is unchanged, and
    validated in its current mode: gradients are compared in training mode. With `run=False` it is only called eagerly.
    Sample inputs are a tensor, a tuple of arguments or a dict of keyword arguments.

    Raises:
        TPUModelPreparationError: It is not a module.
        TPUValidationError: The configuration is strict, and a check did not pass.
    """
    module, config = checked_model(model), checked_config(tpu_config)
    reports = [*check_model(module, config)]
    if sample_inputs is not None:
        reports += check_run(module, config, SampleInputs.of(sample_inputs), is_compiled=run)
    return _summary(reports, config)


def require_nothing_found(summary: ValidationSummary, what: str) -> None:
    """Raise a TPUValidationError that names every check that failed or warned."""
    found = [f"{r.name} ({r.status}): {r.message}" for r in summary.reports if r.status != "passed"]
    if found:
        raise TPUValidationError(
            f"{what} found {len(found)} problem(s). {'; '.join(found)}. Try: change them, or set "
            "enable_strict_validation = False."
        )


def _summary(found: Iterable[ValidationReport], config: TPUConfig) -> ValidationSummary:
    reports = tuple(found)
    statuses = [report.status for report in reports]
    passed, failed, warnings = (statuses.count(status) for status in ("passed", "failed", "warning"))
    success_rate = 1 - failed / max(len(reports), 1)
    summary = ValidationSummary(len(reports), passed, failed, warnings, success_rate, reports)
    if config.enable_strict_validation:
        require_nothing_found(summary, "strict validation")
    return summary
