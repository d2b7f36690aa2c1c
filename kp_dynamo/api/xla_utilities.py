"""`XLAUtilities`: environment information, compile profiles, graphs as text, and compiler flags."""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

import torch
from torch import nn

from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.aot.report import AotReport
from kp_dynamo.api.compile_timing import time_compilation
from kp_dynamo.api.environment import checked_config, start_device
from kp_dynamo.api.hints import with_hints
from kp_dynamo.api.models import SampleInputs, by_position, checked_model, device_of
from kp_dynamo.api.xla_compiler import readable_errors
from kp_dynamo.api.xla_flags import best_flags
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import check_versions
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUConfig, TPUVersion
from kp_dynamo.config.translation import chip_of, compile_arguments, compile_options
from kp_dynamo.exceptions import TPUBackendError, TPUConfigurationError

_DISTRIBUTIONS = ("torch", "torch_xla", "libtpu", "jax", "jaxlib")
_VARIABLES = ("PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "KP_TPU_LOG")


class XLAUtilities:
    """Diagnostics without side effects, except that some reset Dynamo."""

    @staticmethod
    def get_xla_env_info() -> dict[str, Any]:
        """Versions ("" if not installed), environment variables that are set, and the device if it has started."""
        problem = ""
        try:
            check_versions()
        except TPUBackendError as found:
            problem = str(found)
        is_started = xla.is_started()
        return {
            "xla_available": not problem,
            "problem": problem,
            "versions": {name: _version(name) for name in _DISTRIBUTIONS},
            "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
            "is_started": is_started,
            "device": str(xla.device()) if is_started else None,
            "device_kind": xla.device_kind() if is_started else None,
            "chip": xla.chip_name() if is_started else None,
        }

    @staticmethod
    def profile_xla_compilation(
        model: nn.Module, sample_inputs: Any, tpu_config: TPUConfig | None = None
    ) -> dict[str, float]:
        """Compile `model` without any cache and report the time by stage. Resets Dynamo.

        Args:
            model: The model, in its current mode; it is called once and left unchanged.
            sample_inputs: Its inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
            tpu_config: The configuration; None: the defaults.

        Returns:
            Seconds: "dynamo", "aot" (AOTAutograd, partitioner and keys), "passes", "trace", "xla", "run" (the rest,
            including the model's own run) and "total".

        Raises:
            TPUBackendError: The model cannot be compiled, as one of its subclasses.
        """
        module, arguments = _prepared(model, tpu_config)
        with readable_errors():
            return time_compilation(module, SampleInputs.of(sample_inputs).on(device_of(module)), arguments)

    @staticmethod
    def debug_xla_graph(
        model: nn.Module, sample_inputs: Any, tpu_config: TPUConfig | None = None
    ) -> dict[str, dict[str, str]]:
        """The graphs of `model` as text: "fx" (Dynamo's), "aten" (after the passes) and "stablehlo", by name.

        The model does not run, and no program is compiled. In training mode the backward is included. Resets Dynamo.

        Args:
            model: The model, in its current mode.
            sample_inputs: Its inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
            tpu_config: The configuration; None: the defaults.

        Raises:
            TPUBackendError: The model cannot be traced, as one of its subclasses.
        """
        from kp_dynamo.api.graph_texts import graph_texts

        module, arguments = _prepared(model, tpu_config)
        options = CompileOptions.from_dict(arguments["options"])
        with readable_errors():
            return graph_texts(module, SampleInputs.of(sample_inputs), options)

    @staticmethod
    def optimize_xla_flags(
        version: TPUVersion | str = TPUVersion.AUTO, model: nn.Module | None = None, sample_inputs: Any = None
    ) -> list[str]:
        """Flags for `TPUConfig.xla_flags` that speed up a model on a chip, by the estimate of the TPU compiler.

        Each of `xla_flags.CANDIDATES` is tried: the compiler must accept it, and the modelled time must drop by at
        least 2%. Each takes one compilation, seconds to minutes, and nothing runs on a chip. Resets Dynamo.

        Args:
            version: The chip.
            model: The model, in its current mode; None: a Linear layer and a GELU of width 1024.
            sample_inputs: Its inputs: a tensor, a tuple of arguments or a dict of keyword arguments.

        Raises:
            TPUConfigurationError: An unknown version, or only one of `model` and `sample_inputs`.
            TPUNotAvailableError: The extra `tpu` is not installed.
        """
        config = TPUConfig(version=version)  # type: ignore[arg-type]  # a string becomes a member
        if (model is None) != (sample_inputs is None):
            raise TPUConfigurationError("give both model and sample_inputs, or neither")
        module = checked_model(_an_example() if model is None else model)
        given = torch.empty(256, 1024, device="meta") if sample_inputs is None else sample_inputs
        module_by_position, args = by_position(module, SampleInputs.of(given))
        target, options = chip_of(config, None).name, compile_options(config)

        def compile_once() -> AotReport:
            return aot_compile(module_by_position, args, target=target, options=options, train=module.training)

        return best_flags(compile_once)


def _an_example() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(1024, 1024), nn.GELU()).eval()


def _prepared(model: nn.Module, tpu_config: TPUConfig | None) -> tuple[nn.Module, dict[str, Any]]:
    config = checked_config(TPUConfig() if tpu_config is None else tpu_config)
    module = checked_model(model)
    start_device(config)
    return module, with_hints(module, compile_arguments(config, present=xla.chip_name()))


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
