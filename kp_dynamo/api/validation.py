"""Validates a configuration, and a model: its fit to the chip and whether it accepts its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, Literal

import torch
from torch import nn

from kp_dynamo.api.environment import checked_config, deciding_chip, late_flags
from kp_dynamo.api.models import SampleInputs, checked_model, device_of, unchanged
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import KernelPyTorchConfig, TPUCompilationMode, TPUConfig, TPUTopology, TPUVersion
from kp_dynamo.exceptions import TPUBackendError, TPUValidationError
from kp_dynamo.hardware import CHIPS, GB, Chip, memory_budget_bytes

_NARROW = {torch.float16: "bfloat16 is the TPU's own narrow dtype", torch.float64: "the TPU computes it in software"}

Status = Literal["passed", "failed", "warning"]


@dataclass(frozen=True)
class ValidationReport:
    """The result of one check."""

    name: str
    status: Status
    message: str


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
    return _summary(_check_config(tpu), tpu)


def validate_tpu_model(model: nn.Module, tpu_config: TPUConfig, sample_inputs: Any = None) -> ValidationSummary:
    """Check a model's memory, dtypes and sizes; with sample inputs, call it eagerly and leave it unchanged.

    Sizes that do not fill the chip's tiles are warnings: the chip computes the padding too. Sample inputs are a tensor,
    a tuple of arguments or a dict of keyword arguments. The model gets a copy of them, in the grad mode of the caller.

    Raises:
        TPUModelPreparationError: It is not a module.
        TPUValidationError: The configuration is strict, and a check did not pass.
    """
    module, config = checked_model(model), checked_config(tpu_config)
    reports = [*_check_model(module, config)]
    if sample_inputs is not None:
        reports += _check_inputs(module, SampleInputs.of(sample_inputs))
    return _summary(reports, config)


def require_valid(summary: ValidationSummary, *, is_strict: bool) -> None:
    """Raise a TPUValidationError that names every check that failed or, in strict validation, warned."""
    refused = ("failed", "warning") if is_strict else ("failed",)
    found = [f"{r.name} ({r.status}): {r.message}" for r in summary.reports if r.status in refused]
    if found:
        strict, remedy = ("strict ", ", or set enable_strict_validation = False") if is_strict else ("", "")
        raise TPUValidationError(
            f"{strict}validation found {len(found)} problem(s). {'; '.join(found)}. Try: change them{remedy}."
        )


def _summary(found: Iterable[ValidationReport], config: TPUConfig) -> ValidationSummary:
    reports = tuple(found)
    statuses = [report.status for report in reports]
    passed, failed, warnings = (statuses.count(status) for status in ("passed", "failed", "warning"))
    success_rate = 1 - failed / max(len(reports), 1)
    summary = ValidationSummary(len(reports), passed, failed, warnings, success_rate, reports)
    if config.enable_strict_validation:
        require_valid(summary, is_strict=True)
    return summary


def _check_config(config: TPUConfig) -> Iterator[ValidationReport]:
    """Settings that will raise, are ignored, or are wasteful."""
    late = late_flags(config.xla_flags)
    is_pjit, is_superpod = config.compilation_mode is TPUCompilationMode.PJIT, config.topology is TPUTopology.SUPERPOD
    is_wide = config.mixed_precision and config.precision == "float32"
    # Until the device has started, AUTO may turn out to be any chip.
    chip, is_known = deciding_chip(config), config.version is not TPUVersion.AUTO or xla.is_started()
    rules: tuple[tuple[str, bool, Status, str], ...] = (
        ("enabled", not config.enabled, "failed", "the TPU is disabled"),
        ("compilation_mode", is_pjit, "failed", "PJIT is unsupported; compiling raises"),
        ("topology", is_superpod, "failed", "SUPERPOD raises: several slices are unsupported"),
        ("xla_flags", bool(late), "failed", f"too late for {' '.join(late)}: the XLA client has already started"),
        ("mixed_precision", is_wide, "warning", "no effect: precision is float32"),
        ("cache_max_size", config.cache_max_size == 1, "warning", "a step's forward and backward evict each other"),
        ("memory_fraction", config.memory_fraction > 0.95, "warning", "the runtime needs some memory as well"),
    )
    for version, given in ((TPUVersion.V6E, config.v6e_memory_gb), (TPUVersion.V7, config.v7_memory_gb)):
        name, vendor_gb = f"{version.value}_memory_gb", CHIPS[version.value].hbm_bytes / GB
        is_unused = given is not None and is_known and chip.name != version.value
        why = f"no effect: the chip is a {chip.name}" if is_unused else f"the vendor says {vendor_gb:.0f} GB"
        rules += ((name, is_unused or (given or 0) > vendor_gb, "warning", why),)
    for name, is_found, status, message in rules:
        yield ValidationReport(name, status, message) if is_found else ValidationReport(name, "passed", "fine")


def _check_model(model: nn.Module, config: TPUConfig) -> Iterator[ValidationReport]:
    """What does not fit the chip's memory, is slow on it, or is padded."""
    chip = deciding_chip(config)
    try:
        yield ValidationReport("placement", "passed", f"on {device_of(model)}")
    except TPUBackendError as problem:
        yield ValidationReport("placement", "failed", str(problem))
    yield _memory(model, config, chip)
    for dtype, reason in _NARROW.items():
        if names := [name for name, p in model.named_parameters() if p.dtype == dtype]:
            text = f"{len(names)} parameter(s), the first is {names[0]}: {reason}"
            yield ValidationReport(f"dtype {dtype}", "warning", text)
    off = list(_off_tile_sizes(model, chip))
    for name, sizes, ratio in off:
        text = f"{sizes}; a {chip.name} computes {ratio:.2f} times as much as requested"
        yield ValidationReport(f"tiles {name}", "warning", text)
    if not off:
        text = f"all layers fill the {chip.mxu_size} x {chip.mxu_size} tiles of a {chip.name}"
        yield ValidationReport("tiles", "passed", text)


def _check_inputs(model: nn.Module, inputs: SampleInputs) -> Iterator[ValidationReport]:
    """Whether the model accepts them."""
    try:
        with unchanged(model):
            inputs.on_device_of(model).call(model)
    except Exception as problem:  # noqa: BLE001  # any exception of the model is the finding
        yield ValidationReport("inputs", "failed", f"the model raises {type(problem).__name__}: {problem}")
    else:
        yield ValidationReport("inputs", "passed", "the model accepts them")


def _memory(model: nn.Module, config: TPUConfig, chip: Chip) -> ValidationReport:
    held = sum({id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}.values())
    room = memory_budget_bytes(chip.of_a_device(), config.memory_fraction, None)
    where = chip.device_text("a")
    text = f"parameters and buffers take {held / GB:.3f} GB of the {room / GB:.2f} GB available on {where}"
    is_named = config.version is not TPUVersion.AUTO
    return ValidationReport("memory", "passed" if held <= room else "failed" if is_named else "warning", text)


def _off_tile_sizes(model: nn.Module, chip: Chip) -> Iterator[tuple[str, str, float]]:
    """Layers whose matmuls do not fill the chip's matrix unit: path, sizes as text, computed / requested work."""
    for path, module in model.named_modules():
        sizes = _sizes(module)
        padded = [ceil(size / chip.mxu_size) * chip.mxu_size for size in sizes.values()]
        ratio = prod(padded) / max(prod(sizes.values()), 1)
        if ratio > 1:
            text = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % chip.mxu_size)
            yield path or "model", f"{text}: no multiple of {chip.mxu_size}", ratio


def _sizes(module: nn.Module) -> dict[str, int]:
    """The contracted size and the output size of a layer's matmul; empty if it has none."""
    if isinstance(module, nn.Linear):
        return {"in_features": module.in_features, "out_features": module.out_features}
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        contracted = module.in_channels // module.groups * prod(module.kernel_size)
        return {"in_channels x kernel": contracted, "out_channels": module.out_channels // module.groups}
    if isinstance(module, nn.MultiheadAttention):
        return {"head_dim": module.head_dim}
    return {}
