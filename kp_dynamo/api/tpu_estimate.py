"""What the TPU compiler says of a model, in addition to the measured figures."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

from kp_dynamo.aot.report import AotReport
from kp_dynamo.api.models import SampleInputs
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.config.translation import chip_of
from kp_dynamo.exceptions import TPUBackendError


def is_estimate_possible() -> bool:
    """Whether the TPU compiler is installed and no TPU is present to measure on instead."""
    return bool(find_spec("jax") and find_spec("libtpu")) and xla.device_kind() != "TPU"


def aot_report(module: nn.Module, inputs: SampleInputs, config: TPUConfig, options: dict[str, Any]) -> AotReport:
    """The report of `aot_compile` for the configured chip, in the mode of the model; the model does not run."""
    from kp_dynamo.aot.compiling import aot_compile

    model, args = inputs.by_position(module)
    return aot_compile(model, args, target=chip_of(config, None).name, options=options, train=module.training)


def estimate(module: nn.Module, inputs: SampleInputs, config: TPUConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The figures of `aot_report`, or "target" and "problem" if the TPU compiler cannot compile the model."""
    try:
        report = aot_report(module, inputs, config, options)
    except TPUBackendError as problem:
        return {"target": chip_of(config, None).name, "problem": str(problem)}
    return {
        "target": report.target,
        "train": report.train,
        "cycles_ms": report.estimated_ms,
        "modelled_ms": report.modelled_ms,
        "peak_bytes": report.peak_bytes,
        "fits": report.fits,
    }
