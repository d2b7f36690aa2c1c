"""`XLAUtilities`: environment information, compile profiles, graphs as text, and compiler flags."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from kp_dynamo.api.environment import checked_config, deciding_chip, xla_problem
from kp_dynamo.api.models import SampleInputs, checked_model
from kp_dynamo.api.xla_compiler import arguments_for, time_compilation
from kp_dynamo.compat import chips, xla
from kp_dynamo.compat.versions import version_of
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import TPUConfig, TPUVersion

_DISTRIBUTIONS = ("torch", "torch_xla", "libtpu", "jax", "jaxlib")
_VARIABLES = ("PJRT_DEVICE", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "KP_TPU_LOG")

_OVERLAP = [
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
]
"""MaxText's flags that overlap the all-reduce of gradients with the backward. By the compiler's model, a transformer
layer on one chip (width 768, 4 x 512 tokens) takes the same time with them, and with `xla_tpu_scoped_vmem_limit_kib` at
98304 it takes 25% longer on a v5e, 32% on a v5p and 21% on a v6e, so that flag is left out."""


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
            "device_kind": chips.device_kind() if is_started else None,
            "chip": chips.chip_name() if is_started else None,
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
        return time_compilation(model, sample_inputs, checked_config(tpu_config or TPUConfig()))

    @staticmethod
    def debug_xla_graph(
        model: nn.Module, sample_inputs: Any, tpu_config: TPUConfig | None = None
    ) -> dict[str, dict[str, str]]:
        """The graphs of `model` as text: "fx" (Dynamo's), "aten" (after the passes) and "stablehlo", by name.

        The model does not run, and no program is compiled. In training mode the backward is included.
        """
        module = checked_model(model)
        options = CompileOptions.from_dict(arguments_for(module, checked_config(tpu_config or TPUConfig()))["options"])
        from kp_dynamo.aot.trace_programs import graph_texts

        return graph_texts(*SampleInputs.of(sample_inputs).by_position(module), options, module.training)

    @staticmethod
    def optimize_xla_flags(version: TPUVersion | str = TPUVersion.AUTO) -> list[str]:
        """Flags for `TPUConfig.xla_flags` that speed up data-parallel training on a chip; an unknown version raises.

        They are for v4, v5e, v5p and v6e, whose compilers know them. A v7 has none, as they are untested there.
        """
        chip = deciding_chip(TPUConfig(version=version))  # type: ignore[arg-type]  # a string becomes a member
        return [] if chip.name == "v7" else [*_OVERLAP]
