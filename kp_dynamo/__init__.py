"""A `torch.compile` backend for TPUs: `torch.compile(model, backend="kp_tpu")`.

This module lists the public API. Names are imported on first use: importing the package neither imports torch_xla nor
starts a device. It only sets an XLA flag and a variable of torch_xla, which have no effect once a device has started or
a scatter was lowered, configures the logs if KP_TPU_LOG is "json", and enables the disk cache if KP_TPU_CACHE_DIR names
a folder, or takes its library away that a parent process put in the place of libtpu. That imports torch_xla if
PJRT_DEVICE names a plugin other than a TPU's, because torch_xla then knows where it is.
"""

from __future__ import annotations

from importlib import import_module
from os import environ as _environ
from typing import TYPE_CHECKING

from kp_dynamo.compat import dense_scatters as _dense_scatters
from kp_dynamo.compat import own_source as _own_source  # noqa: F401  # it notes when the package was imported
from kp_dynamo.compat.fast_extremes import keep_nan as _keep_nan
from kp_dynamo.exceptions import (
    TPUBackendError,
    TPUCacheError,
    TPUCheckpointError,
    TPUConfigurationError,
    TPUDeviceError,
    TPUDistributedError,
    TPUMemoryError,
    TPUMemoryPoolError,
    TPUModelPreparationError,
    TPUNotAvailableError,
    TPUOptimizationError,
    TPUOutOfMemoryError,
    TPUValidationError,
    XLACompilationError,
    XLACompilationTimeoutError,
)

if TYPE_CHECKING:
    from kp_dynamo.aot.compiling import aot_compile
    from kp_dynamo.aot.report import AotReport
    from kp_dynamo.api.checkpoint.checkpoint import load_checkpoint, save_checkpoint
    from kp_dynamo.api.memory.manager import TPUMemoryManager
    from kp_dynamo.api.sharded_model import shard, shard_batch
    from kp_dynamo.api.spmd_config import SPMDConfig
    from kp_dynamo.api.tpu_backend import TPUBackend
    from kp_dynamo.api.tpu_optimizer import TPUOptimizationResult, TPUOptimizer
    from kp_dynamo.api.validation import validate_tpu_configuration, validate_tpu_model
    from kp_dynamo.api.xla_compiler import XLACompiler
    from kp_dynamo.api.xla_device_manager import XLADeviceManager
    from kp_dynamo.api.xla_distributed_training import XLADistributedTraining
    from kp_dynamo.api.xla_optimizations import XLAOptimizations, create_xla_integration
    from kp_dynamo.api.xla_utilities import XLAUtilities
    from kp_dynamo.backend import cache_stats, clear_cache, kp_tpu
    from kp_dynamo.block_compiler import compile_blocks
    from kp_dynamo.buckets.bucket_plan import BucketPlan, plan_buckets
    from kp_dynamo.buckets.marking import mark_sequence
    from kp_dynamo.cache.lru import LRUCache
    from kp_dynamo.config.options import CompileOptions
    from kp_dynamo.config.tpu_config import KernelPyTorchConfig, TPUCompilationMode, TPUConfig, TPUTopology, TPUVersion
    from kp_dynamo.disk_cache.enable import enable_disk_cache
    from kp_dynamo.explanation.explain import Explanation, explain
    from kp_dynamo.integrations.generation import compile_for_generation
    from kp_dynamo.passes.base import GraphPass, PassReport
    from kp_dynamo.passes.flash_attention import FlashAttention
    from kp_dynamo.planner.planning import plan
    from kp_dynamo.planner.result import Plan
    from kp_dynamo.telemetry.watching import watch

__version__ = "0.1.0"

__all__ = [
    "AotReport",
    "BucketPlan",
    "CompileOptions",
    "Explanation",
    "FlashAttention",
    "GraphPass",
    "KernelPyTorchConfig",
    "LRUCache",
    "PassReport",
    "Plan",
    "SPMDConfig",
    "TPUBackend",
    "TPUBackendError",
    "TPUCacheError",
    "TPUCheckpointError",
    "TPUCompilationMode",
    "TPUConfig",
    "TPUConfigurationError",
    "TPUDeviceError",
    "TPUDistributedError",
    "TPUMemoryError",
    "TPUMemoryManager",
    "TPUMemoryPoolError",
    "TPUModelPreparationError",
    "TPUNotAvailableError",
    "TPUOptimizationError",
    "TPUOptimizationResult",
    "TPUOptimizer",
    "TPUOutOfMemoryError",
    "TPUTopology",
    "TPUValidationError",
    "TPUVersion",
    "XLACompilationError",
    "XLACompilationTimeoutError",
    "XLACompiler",
    "XLADeviceManager",
    "XLADistributedTraining",
    "XLAOptimizations",
    "XLAUtilities",
    "__version__",
    "aot_compile",
    "cache_stats",
    "clear_cache",
    "compile_blocks",
    "compile_for_generation",
    "create_xla_integration",
    "enable_disk_cache",
    "explain",
    "kp_tpu",
    "load_checkpoint",
    "mark_sequence",
    "plan",
    "plan_buckets",
    "save_checkpoint",
    "shard",
    "shard_batch",
    "validate_tpu_configuration",
    "validate_tpu_model",
    "watch",
]

_HOME_OF = {
    "AotReport": "kp_dynamo.aot.report",
    "BucketPlan": "kp_dynamo.buckets.bucket_plan",
    "CompileOptions": "kp_dynamo.config.options",
    "Explanation": "kp_dynamo.explanation.explain",
    "FlashAttention": "kp_dynamo.passes.flash_attention",
    "GraphPass": "kp_dynamo.passes.base",
    "KernelPyTorchConfig": "kp_dynamo.config.tpu_config",
    "LRUCache": "kp_dynamo.cache.lru",
    "PassReport": "kp_dynamo.passes.base",
    "Plan": "kp_dynamo.planner.result",
    "SPMDConfig": "kp_dynamo.api.spmd_config",
    "TPUMemoryManager": "kp_dynamo.api.memory.manager",
    "TPUBackend": "kp_dynamo.api.tpu_backend",
    "TPUCompilationMode": "kp_dynamo.config.tpu_config",
    "TPUConfig": "kp_dynamo.config.tpu_config",
    "TPUOptimizationResult": "kp_dynamo.api.tpu_optimizer",
    "TPUOptimizer": "kp_dynamo.api.tpu_optimizer",
    "TPUTopology": "kp_dynamo.config.tpu_config",
    "TPUVersion": "kp_dynamo.config.tpu_config",
    "XLACompiler": "kp_dynamo.api.xla_compiler",
    "XLADeviceManager": "kp_dynamo.api.xla_device_manager",
    "XLADistributedTraining": "kp_dynamo.api.xla_distributed_training",
    "XLAOptimizations": "kp_dynamo.api.xla_optimizations",
    "XLAUtilities": "kp_dynamo.api.xla_utilities",
    "aot_compile": "kp_dynamo.aot.compiling",
    "compile_blocks": "kp_dynamo.block_compiler",
    "compile_for_generation": "kp_dynamo.integrations.generation",
    "cache_stats": "kp_dynamo.backend",
    "clear_cache": "kp_dynamo.backend",
    "create_xla_integration": "kp_dynamo.api.xla_optimizations",
    "enable_disk_cache": "kp_dynamo.disk_cache.enable",
    "explain": "kp_dynamo.explanation.explain",
    "kp_tpu": "kp_dynamo.backend",
    "load_checkpoint": "kp_dynamo.api.checkpoint.checkpoint",
    "mark_sequence": "kp_dynamo.buckets.marking",
    "plan": "kp_dynamo.planner.planning",
    "plan_buckets": "kp_dynamo.buckets.bucket_plan",
    "save_checkpoint": "kp_dynamo.api.checkpoint.checkpoint",
    "shard": "kp_dynamo.api.sharded_model",
    "shard_batch": "kp_dynamo.api.sharded_model",
    "validate_tpu_configuration": "kp_dynamo.api.validation",
    "validate_tpu_model": "kp_dynamo.api.validation",
    "watch": "kp_dynamo.telemetry.watching",
}

if _environ.get("KP_TPU_LOG") == "json":  # from the first record on; compiling refuses other values
    import_module("kp_dynamo.telemetry.log").configure()
_keep_nan()
_dense_scatters.turn_off()
if _environ.get("KP_TPU_CACHE_DIR") or _environ.get("TPU_LIBRARY_PATH"):  # a parent process may have set it
    import_module("kp_dynamo.disk_cache.enable").enable_from_environment()


def __getattr__(name: str) -> object:
    if name in ("integrations", "telemetry"):
        return import_module(f"kp_dynamo.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
