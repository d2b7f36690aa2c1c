"""Is a configuration sensible, does a model suit the chip, and does it compute compiled what it computes eagerly?"""

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
    """One thing that was looked at."""

    name: str
    status: Status
    message: str


@dataclass(frozen=True)
class ValidationSummary:
    """What validation found; `str()` is for people, `to_dict()` for JSON."""

    reports: tuple[ValidationReport, ...]

    @property
    def total_tests(self) -> int:
        """How many things were looked at."""
        return len(self.reports)

    @property
    def passed(self) -> int:
        """Those that are fine."""
        return self._count("passed")

    @property
    def failed(self) -> int:
        """Those that do not work."""
        return self._count("failed")

    @property
    def warnings(self) -> int:
        """Those that work, and cost something or have no effect."""
        return self._count("warning")

    @property
    def success_rate(self) -> float:
        """Share of what did not fail, 0 to 1."""
        return 1 - self.failed / self.total_tests if self.total_tests else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        counts = {name: getattr(self, name) for name in ("total_tests", "passed", "failed", "warnings", "success_rate")}
        return {**counts, "reports": [asdict(report) for report in self.reports]}

    def __str__(self) -> str:
        return "\n".join(f"{report.status:7} {report.name}: {report.message}" for report in self.reports)

    def _count(self, status: Status) -> int:
        return sum(report.status == status for report in self.reports)


def validate_tpu_configuration(config: KernelPyTorchConfig | TPUConfig) -> ValidationSummary:
    """Look for settings that will raise, have no effect, or cost more than they bring. Starts no device.

    Raises:
        TPUConfigurationError: It is no configuration.
        TPUValidationError: The configuration is strict, and there is something to say.
    """
    tpu = config.hardware.tpu if isinstance(config, KernelPyTorchConfig) else checked_config(config)
    return _summary(findings_in_config(tpu), tpu)


def validate_tpu_model(
    model: nn.Module, tpu_config: TPUConfig, sample_inputs: Any = None, *, run: bool = True
) -> ValidationSummary:
    """Look at a model's memory, dtypes and sizes; with sample inputs call it, and compare compiled with eager.

    Sizes off the tiles of the chip are warnings: the chip computes the padding too. The model is left as it was.

    Args:
        model: In the mode it is to be used in: gradients are compared in training mode.
        tpu_config: Decides about the chip and how the model is compiled.
        sample_inputs: What the model is called with: a tensor, a tuple of arguments or a dict of keyword arguments.
        run: False: call the model with them eagerly only.

    Raises:
        TPUModelPreparationError: It is no module.
        TPUValidationError: The configuration is strict, and there is something to say.
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
    """Raise where something failed or is warned of.

    Raises:
        TPUValidationError: It names all of it.
    """
    found = [f"{r.name} ({r.status}): {r.message}" for r in summary.reports if r.status != "passed"]
    if found:
        raise TPUValidationError(
            f"{what} found {len(found)} thing(s). {'; '.join(found)}. Change them, or set "
            "enable_strict_validation = False."
        )
