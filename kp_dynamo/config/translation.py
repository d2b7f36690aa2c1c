"""Translates a `TPUConfig` into the arguments of `torch.compile(backend="kp_tpu")`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kp_dynamo.config.levels import LEVELS
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUCompilationMode, TPUConfig, TPUTopology, TPUVersion
from kp_dynamo.exceptions import TPUConfigurationError, TPUDistributedError, TPUNotAvailableError
from kp_dynamo.hardware import CHIPS, GB, Chip

LEVEL_OF_NUMBER = tuple(LEVELS)
"""The levels of `xla_optimization_level` 0, 1, 2."""


def chip_of(config: TPUConfig, present: str | None) -> Chip:
    """The chip to compile for: the configured one, else the present one, else v5e; with the user's memory override.

    Args:
        config: The configuration.
        present: Name of the chip of this machine, None if it has none.
    """
    name = (present or "v5e") if config.version is TPUVersion.AUTO else config.version.value
    memory_gb = {"v6e": config.v6e_memory_gb, "v7": config.v7_memory_gb}.get(name)
    return CHIPS[name] if memory_gb is None else CHIPS[name].with_memory(memory_gb)


def compile_options(config: TPUConfig, level: str | None = None, present: str | None = None) -> dict[str, Any]:
    """The options of `torch.compile` for a configuration.

    Args:
        config: The configuration.
        level: "conservative", "balanced" or "aggressive"; None: that of `xla_optimization_level`.
        present: Name of the chip of this machine, None if it has none.
    """
    options: dict[str, Any] = {
        "level": level or LEVEL_OF_NUMBER[config.xla_optimization_level],
        "precision": config.precision if config.mixed_precision else "float32",
        "cache_size": config.cache_max_size,
        "compile_timeout_s": config.compilation_timeout_seconds,
        **_memory_options(config, present),
    }
    if not config.gradient_checkpointing:
        options["checkpoint"] = "off"
    if config.enable_strict_validation:
        options["strict"] = True
    if config.enable_xla_dynamic_shapes:
        options["buckets"] = "pow2"
    return options


def compile_arguments(config: TPUConfig, level: str | None = None, present: str | None = None) -> dict[str, Any]:
    """The keyword arguments of `torch.compile`, including the options; see `compile_options`.

    Raises:
        TPUConfigurationError: The mode is PJIT.
    """
    if config.compilation_mode is TPUCompilationMode.PJIT:
        raise TPUConfigurationError(_no_pjit())
    return {
        "backend": "kp_tpu",
        "fullgraph": config.compilation_mode is TPUCompilationMode.XLA,
        "dynamic": None if config.enable_xla_dynamic_shapes else False,
        "options": compile_options(config, level, present),
    }


def require_enabled(config: TPUConfig) -> None:
    """Raise if the configuration disables the TPU.

    Raises:
        TPUNotAvailableError: `enabled` is False.
    """
    if not config.enabled:
        raise TPUNotAvailableError(
            "the configuration disables the TPU: enabled=False. Try: config.hardware.tpu.enabled = True, or run the "
            "model without this backend."
        )


def require_topology(config: TPUConfig, num_processes: int, num_devices: int, is_spmd: bool) -> None:
    """Raise if the available devices do not match the configured topology.

    Args:
        config: The configuration.
        num_processes: Processes of the job.
        num_devices: Devices of the job.
        is_spmd: Whether programs run on all of them.

    Raises:
        TPUDistributedError: They do not match.
    """
    if config.topology is TPUTopology.SUPERPOD:
        why = "this version does not support several slices"
    elif num_processes > 1:
        why = "this version does not support programs over the devices of several processes"
    elif config.topology is TPUTopology.POD and num_devices == 1:
        why = "there is no other device to share with (CPU_NUM_DEVICES=4 gives XLA several CPU devices)"
    elif config.topology is TPUTopology.SINGLE and is_spmd and num_devices > 1:
        why = "torch_xla.runtime.use_spmd() was called, so programs run on all devices"
    else:
        return
    raise TPUDistributedError(
        f"topology={config.topology.name} in a job of {num_processes} process(es) with {num_devices} device(s): {why}. "
        "Allowed: one process, with topology AUTO; SINGLE for one device; POD for all devices of the process."
    )


def _memory_options(config: TPUConfig, present: str | None) -> dict[str, Any]:
    """Options that keep their defaults are omitted, because setting them makes the backend refuse large graphs."""
    chip, options = chip_of(config, present), dict[str, Any]()
    if config.version is not TPUVersion.AUTO or present is not None:
        options["target"] = chip.name
    if config.memory_fraction != CompileOptions().memory_fraction:
        options["memory_fraction"] = config.memory_fraction
    if chip.hbm_bytes != CHIPS[chip.name].hbm_bytes:
        # Of what one program has: a chip, or half a v7.
        options["memory_budget_gb"] = chip.of_a_device().hbm_bytes * config.memory_fraction / GB
    return options


def _no_pjit() -> str:
    found = "JAX is installed here, but" if find_spec("jax") else "JAX is not installed here, and"
    return (
        f"compilation_mode=PJIT is unsupported: {found} kp_tpu cannot compile a torch model through JAX's pjit. "
        "Allowed: TPUCompilationMode.TORCH_XLA, or XLA for one graph of the whole model."
    )
