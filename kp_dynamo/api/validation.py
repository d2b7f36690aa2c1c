"""Validates a configuration, and a model: its fit to the chip and the agreement of compiled and eager results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import nn

from kp_dynamo.api.environment import checked_config
from kp_dynamo.api.models import SampleInputs, checked_model
from kp_dynamo.api.validation_rules import Finding, findings_in_config, findings_in_model, findings_in_run
from kp_dynamo.config.tpu_config import KernelPyTorchConfig, TPUConfig
from kp_dynamo.exceptions import TPUValidationError

Status = Literal["passed", "failed", "warning"]


@dataclass(frozen=True)
class ValidationReport:
    """The result of one check."""

    name: str
    status: Status
    message: str


@dataclass(frozen=True)
class ValidationSummary:
    """The results of a validation; `str()` is for people, `to_dict()` for JSON."""

    reports: tuple[ValidationReport, ...]

    @property
    def total_tests(self) -> int:
        """Number of checks."""
        return len(self.reports)

    @property
    def passed(self) -> int:
        """Number of checks that passed."""
        return self._count("passed")

    @property
    def failed(self) -> int:
        """Number of checks that failed."""
        return self._count("failed")

    @property
    def warnings(self) -> int:
        """Number of warnings: settings or sizes that work, but are costly or have no effect."""
        return self._count("warning")

    @property
    def success_rate(self) -> float:
        """Share of checks that did not fail, 0 to 1."""
        return 1 - self.failed / self.total_tests if self.total_tests else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain, JSON-serializable values."""
        counts = {name: getattr(self, name) for name in ("total_tests", "passed", "failed", "warnings", "success_rate")}
        return {**counts, "reports": [asdict(report) for report in self.reports]}

    def __str__(self) -> str:
        return "\n".join(f"{report.status:7} {report.name}: {report.message}" for report in self.reports)

    def _count(self, status: Status) -> int:
        return sum(report.status == status for report in self.reports)


def validate_tpu_configuration(config: KernelPyTorchConfig | TPUConfig) -> ValidationSummary:
    """Check for settings that will raise, have no effect, or cost more than they gain. Starts no device.

    Raises:
        TPUConfigurationError: It is not a configuration.
        TPUValidationError: The configuration is strict, and a check did not pass.
    """
    tpu = config.hardware.tpu if isinstance(config, KernelPyTorchConfig) else checked_config(config)
    return _summary(findings_in_config(tpu), tpu)


def validate_tpu_model(
    model: nn.Module, tpu_config: TPUConfig, sample_inputs: Any = None, *, run: bool = True
) -> ValidationSummary:
    """Check a model's memory, dtypes and sizes; with sample inputs, call it and compare compiled with eager.

    Sizes that do not fill the chip's tiles are warnings: the chip computes the padding too. The model is unchanged.

    Args:
        model: The model in the mode to validate; gradients are compared in training mode.
        tpu_config: Selects the chip and how the model is compiled.
        sample_inputs: Its inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        run: False: call the model only eagerly.

    Raises:
        TPUModelPreparationError: It is not a module.
        TPUValidationError: The configuration is strict, and a check did not pass.
    """
    module, config = checked_model(model), checked_config(tpu_config)
    findings = [*findings_in_model(module, config)]
    if sample_inputs is not None:
        findings += findings_in_run(module, config, SampleInputs.of(sample_inputs), is_compiled=run)
    return _summary(findings, config)


def _summary(findings: Iterable[Finding], config: TPUConfig) -> ValidationSummary:
    summary = ValidationSummary(tuple(ValidationReport(*finding) for finding in findings))
    if config.enable_strict_validation:
        require_nothing_found(summary, "strict validation")
    return summary


def require_nothing_found(summary: ValidationSummary, what: str) -> None:
    """Raise if any check failed or warned.

    Raises:
        TPUValidationError: The message names all of them.
    """
    found = [f"{r.name} ({r.status}): {r.message}" for r in summary.reports if r.status != "passed"]
    if found:
        raise TPUValidationError(
            f"{what} found {len(found)} problem(s). {'; '.join(found)}. Try: change them, or set "
            "enable_strict_validation = False."
        )
