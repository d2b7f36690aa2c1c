"""The checks of validation: each one yields its findings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.api.comparison import Difference, difference
from kp_dynamo.api.environment import deciding_chip, late_flags
from kp_dynamo.api.models import SampleInputs, device_of, unchanged
from kp_dynamo.api.tiles import off_tile_sizes
from kp_dynamo.config.tpu_config import TPUCompilationMode, TPUConfig, TPUTopology, TPUVersion
from kp_dynamo.exceptions import TPUBackendError
from kp_dynamo.hardware import CHIPS, GB, SUBLANES, Chip, memory_budget_bytes

_NARROW = {torch.float16: "bfloat16 is the TPU's own narrow dtype", torch.float64: "the TPU computes it in software"}
_CASTS = 2.0**-8
"""Twice the relative error of one rounding to bfloat16."""
_NO_CASTS = 1e-5


class Finding(NamedTuple):
    """The outcome of one check."""

    name: str
    status: Literal["passed", "failed", "warning"]
    message: str


def findings_in_config(config: TPUConfig) -> Iterator[Finding]:
    """Settings that will raise, are ignored, or are wasteful."""
    yield _unless(config.enabled, "enabled", "failed", "the TPU is disabled")
    yield _unless(
        config.compilation_mode is not TPUCompilationMode.PJIT,
        "compilation_mode",
        "failed",
        "PJIT is unsupported; compiling raises",
    )
    is_one_slice = config.topology is not TPUTopology.SUPERPOD
    yield _unless(is_one_slice, "topology", "failed", "SUPERPOD raises: several slices are unsupported")
    late = late_flags(config.xla_flags)
    yield _unless(not late, "xla_flags", "failed", f"too late for {' '.join(late)}: the XLA client has already started")
    is_wide = config.mixed_precision and config.precision == "float32"
    yield _unless(not is_wide, "mixed_precision", "warning", "no effect: precision is float32")
    yield _unless(
        config.cache_max_size > 1, "cache_max_size", "warning", "a step's forward and backward evict each other"
    )
    yield _unless(config.memory_fraction <= 0.95, "memory_fraction", "warning", "the runtime needs some memory as well")
    is_ordered = config.monitoring_interval_seconds <= config.monitoring_duration_seconds
    yield _unless(is_ordered, "monitoring", "warning", "the interval is longer than the duration: only one sample")
    yield from _memory_overrides(config)


def _memory_overrides(config: TPUConfig) -> Iterator[Finding]:
    for version, given in ((TPUVersion.V6E, config.v6e_memory_gb), (TPUVersion.V7, config.v7_memory_gb)):
        name, vendor_gb = f"{version.value}_memory_gb", CHIPS[version.value].hbm_bytes / GB
        if given is None:
            yield Finding(name, "passed", f"the vendor's {vendor_gb:.0f} GB")
        elif config.version is not version:
            yield Finding(name, "warning", f"no effect: version is {config.version.name}")
        else:
            yield _unless(given <= vendor_gb, name, "warning", f"more than the vendor's {vendor_gb:.0f} GB")


def findings_in_model(model: nn.Module, config: TPUConfig) -> Iterator[Finding]:
    """What does not fit the chip's memory, is slow on it, or is padded."""
    chip = deciding_chip(config)
    yield _placement(model)
    yield _memory(model, config, chip)
    for dtype, reason in _NARROW.items():
        names = [name for name, p in model.named_parameters() if p.dtype == dtype]
        if names:
            yield Finding(f"dtype {dtype}", "warning", f"{len(names)} parameter(s), the first is {names[0]}: {reason}")
    off = list(off_tile_sizes(model, chip))
    for name, text, ratio in off:
        yield Finding(
            f"tiles {name}", "warning", f"{text}; a {chip.name} computes {ratio:.2f} times as much as requested"
        )
    if not off:
        yield Finding(
            "tiles", "passed", f"all layers fill the {chip.mxu_size} x {chip.mxu_size} tiles of a {chip.name}"
        )


def findings_in_run(
    model: nn.Module, config: TPUConfig, inputs: SampleInputs, *, is_compiled: bool
) -> Iterator[Finding]:
    """Whether the model accepts the inputs, and compiled results agree with eager."""
    here = inputs.on_device_of(model)
    yield _batch(here)
    try:
        with unchanged(model), torch.no_grad():
            here.call(model)
    except Exception as problem:  # noqa: BLE001  # any exception of the model is the finding
        yield Finding("inputs", "failed", f"the model raises {type(problem).__name__}: {problem}")
        return
    yield Finding("inputs", "passed", "the model accepts them")
    if is_compiled:
        yield _agreement(model, config, here)


def _placement(model: nn.Module) -> Finding:
    try:
        return Finding("placement", "passed", f"on {device_of(model)}")
    except TPUBackendError as problem:
        return Finding("placement", "failed", str(problem))


def _memory(model: nn.Module, config: TPUConfig, chip: Chip) -> Finding:
    held = sum({id(t): t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]}.values())
    room = memory_budget_bytes(chip, config.memory_fraction, None)
    text = f"parameters and buffers take {held / GB:.3f} GB of the {room / GB:.2f} GB available on a {chip.name}"
    is_named = config.version is not TPUVersion.AUTO
    return Finding("memory", "passed" if held <= room else "failed" if is_named else "warning", text)


def _batch(inputs: SampleInputs) -> Finding:
    tensors = [t for t in pytree.tree_leaves((inputs.args, inputs.kwargs)) if isinstance(t, torch.Tensor) and t.dim()]
    rows = _num_rows(tensors[0]) if tensors else SUBLANES
    text = f"{rows} rows in the first input; a tile has {SUBLANES} rows, and the rest is padding"
    return Finding("batch", "passed" if rows % SUBLANES == 0 else "warning", text)


def _num_rows(tensor: torch.Tensor) -> int:
    """Rows of the matrix that the first layer computes; an integer tensor has one row per index (embedding lookup)."""
    return tensor.numel() // max(tensor.shape[-1], 1) if tensor.is_floating_point() else tensor.numel()


def _agreement(model: nn.Module, config: TPUConfig, inputs: SampleInputs) -> Finding:
    from kp_dynamo.api.xla_compiler import XLACompiler, readable_errors

    try:
        compiled = XLACompiler(config).compile_model(model, use_cache=False)
        with readable_errors():
            apart = difference(model, compiled, inputs)
    except TPUBackendError as problem:
        return Finding("agreement", "failed", f"{type(problem).__name__}: {problem}")
    allowed = _allowed(model, config)
    return _judged(apart, allowed)


def _judged(apart: Difference, allowed: float) -> Finding:
    if apart.is_random:
        return Finding("agreement", "passed", "it compiles and runs; two eager runs differ, so values are not compared")
    distances = [0.0 if distance is None else distance for distance in (apart.results, apart.gradients)]
    text = f"compiled differs from eager by {max(distances):.1e} of the norm, rounding explains {allowed:.1e}"
    # Compare each separately: max() could hide a NaN, which is within no tolerance.
    return Finding("agreement", "passed" if all(d <= allowed for d in distances) else "failed", text)


def _allowed(model: nn.Module, config: TPUConfig) -> float:
    """Tolerance: independent roundings add up like a random walk, one per parameter's matmul."""
    steps = math.sqrt(1 + sum(1 for _ in model.parameters()))
    has_casts = config.mixed_precision and config.precision == "bfloat16"
    return _CASTS * steps if has_casts else _NO_CASTS * steps


def _unless(is_fine: bool, name: str, status: Literal["failed", "warning"], message: str) -> Finding:
    return Finding(name, "passed", "fine") if is_fine else Finding(name, status, message)
