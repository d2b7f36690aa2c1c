"""`XLAUtilities`: environment information, compile profiles, graphs as text, and compiler flags."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kp_dynamo.aot.report import AotReport
from kp_dynamo.api.environment import checked_config, xla_problem
from kp_dynamo.api.models import SampleInputs, checked_model
from kp_dynamo.api.tpu_estimate import aot_report
from kp_dynamo.api.xla_compiler import arguments_for, time_compilation
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import version_of
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUConfig, TPUVersion
from kp_dynamo.config.translation import compile_options
from kp_dynamo.exceptions import TPUConfigurationError, TPUNotAvailableError

_DISTRIBUTIONS = ("torch", "torch_xla", "libtpu", "jax", "jaxlib")
_VARIABLES = ("PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "KP_TPU_LOG")

CANDIDATES = ("--xla_tpu_scoped_vmem_limit_kib=32768", "--xla_tpu_scoped_vmem_limit_kib=65536")
"""Limits of the vector memory of a fusion, which affect single-chip programs. Neither helps one GPT block on a v5e
(inference, width 768, 4 x 512 tokens, `aot --target v5e`): modelled 0.324 ms without, 0.331 and 0.433 with."""

_LEAST_GAIN = 0.02
"""A smaller relative gain is within the error of the compiler's estimates."""


class XLAUtilities:
    """Diagnostics without side effects, except that those of a model reset Dynamo.

    A model is diagnosed in its current mode and left unchanged. Sample inputs are a tensor, a tuple of arguments or a
    dict of keyword arguments. Without a `tpu_config`, the defaults count. A model that cannot be compiled or traced
    raises a TPUBackendError.
    """

    @staticmethod
    def get_xla_env_info() -> dict[str, Any]:
        """Versions ("" if not installed), environment variables that are set, and the device if it has started."""
        problem, is_started = xla_problem(), xla.is_started()
        return {
            "xla_available": not problem,
            "problem": problem,
            "versions": {name: version_of(name) for name in _DISTRIBUTIONS},
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
        """Compile `model` without any cache, call it once, and report the time by stage.

        Returns:
            Seconds: "dynamo", "aot" (AOTAutograd, partitioner and keys), "passes", "trace", "xla", "run" (the rest,
            including the model's own run) and "total".
        """
        return time_compilation(model, sample_inputs, _chosen(tpu_config))

    @staticmethod
    def debug_xla_graph(
        model: nn.Module, sample_inputs: Any, tpu_config: TPUConfig | None = None
    ) -> dict[str, dict[str, str]]:
        """The graphs of `model` as text: "fx" (Dynamo's), "aten" (after the passes) and "stablehlo", by name.

        The model does not run, and no program is compiled. In training mode the backward is included.
        """
        module = checked_model(model)
        options = CompileOptions.from_dict(arguments_for(module, _chosen(tpu_config))["options"])
        from kp_dynamo.aot.trace_programs import graph_texts

        return graph_texts(*SampleInputs.of(sample_inputs).by_position(module), options, module.training)

    @staticmethod
    def optimize_xla_flags(
        version: TPUVersion | str = TPUVersion.AUTO, model: nn.Module | None = None, sample_inputs: Any = None
    ) -> list[str]:
        """Flags for `TPUConfig.xla_flags` that speed up a model on a chip, by the estimate of the TPU compiler.

        Each of `CANDIDATES` is tried: the compiler must accept it, and the modelled time must drop by at
        least 2%. Each takes one compilation, seconds to minutes, and nothing runs on a chip. Without a model, the flags
        are those of a Linear layer and a GELU of width 1024.

        Raises:
            TPUConfigurationError: An unknown version, or only one of `model` and `sample_inputs`.
            TPUNotAvailableError: The extra `tpu` is not installed.
        """
        config = TPUConfig(version=version)  # type: ignore[arg-type]  # a string becomes a member
        if (model is None) != (sample_inputs is None):
            raise TPUConfigurationError("give both model and sample_inputs, or neither")
        module, given = (model, sample_inputs) if model is not None else _example()
        module, inputs = checked_model(module), SampleInputs.of(given)
        return best_flags(lambda: aot_report(module, inputs, config, compile_options(config)))


def _example() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(1024, 1024), nn.GELU()).eval(), torch.empty(256, 1024)


def _chosen(config: TPUConfig | None) -> TPUConfig:
    return checked_config(TPUConfig() if config is None else config)


def best_flags(compile_once: Callable[[], AotReport], candidates: tuple[str, ...] = CANDIDATES) -> list[str]:
    """The candidate with the shortest modelled time, if it beats compiling without flags.

    A candidate that libtpu does not know, or that makes it fail, is skipped. Not thread-safe: the compiler reads the
    environment.

    Raises:
        TPUBackendError: The model does not compile without any flag.
    """
    without = compile_once().modelled_ms
    times = {flag: _modelled_ms(flag, compile_once) for flag in candidates}
    flag = min(times, key=times.__getitem__)
    return [flag] if times[flag] < (1 - _LEAST_GAIN) * without else []


def _modelled_ms(flag: str, compile_once: Callable[[], AotReport]) -> float:
    before = os.environ.get("LIBTPU_INIT_ARGS")
    os.environ["LIBTPU_INIT_ARGS"] = f"{before or ''} {flag}".strip()
    try:
        return compile_once().modelled_ms
    except TPUNotAvailableError:  # libtpu aborts its process on an unknown flag
        return float("inf")
    finally:
        if before is None:
            del os.environ["LIBTPU_INIT_ARGS"]
        else:
            os.environ["LIBTPU_INIT_ARGS"] = before
