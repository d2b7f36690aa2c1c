"""Estimates of the TPU compiler for a model, in addition to the measured figures."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from torch import nn

from kp_dynamo.api.hints import with_hints
from kp_dynamo.api.models import SampleInputs, by_position
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.config.translation import chip_of, compile_options
from kp_dynamo.exceptions import TPUBackendError


def is_estimate_possible() -> bool:
    """Whether the TPU compiler is installed and no TPU is present to measure on instead."""
    return bool(find_spec("jax") and find_spec("libtpu")) and xla.device_kind() != "TPU"


def estimate(module: nn.Module, inputs: SampleInputs, config: TPUConfig, level: str) -> dict[str, Any]:
    """Estimated figures for the configured chip.

    Returns:
        "target", "train", "cycles_ms", "modelled_ms", "peak_bytes" of the largest program and "fits"; or "target" and
        "problem" if the TPU compiler cannot compile the model.
    """
    from kp_dynamo.aot.compiling import aot_compile

    target = chip_of(config, None).name
    options = with_hints(module, {"dynamic": None, "options": compile_options(config, level)}, level)["options"]
    model, args = by_position(module, inputs)
    try:
        report = aot_compile(model, args, target=target, options=options, train=module.training)
    except TPUBackendError as problem:
        return {"target": target, "problem": str(problem)}
    return {
        "target": target,
        "train": module.training,
        "cycles_ms": report.estimated_ms,
        "modelled_ms": report.modelled_ms,
        "peak_bytes": report.peak_bytes,
        "fits": report.fits,
    }
