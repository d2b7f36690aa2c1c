"""A `torch.compile` backend for TPUs: `torch.compile(model, backend="kp_tpu")`.

The public index and nothing else. Names load on first use: importing this package neither imports
torch_xla nor starts a device.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

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
    from kp_dynamo.backend import cache_stats, clear_cache, kp_tpu
    from kp_dynamo.explanation import Explanation, explain
    from kp_dynamo.options import CompileOptions
    from kp_dynamo.passes.base import GraphPass, PassReport
    from kp_dynamo.runtime.memory import TPUMemoryManager

__version__ = "0.1.0"

__all__ = [
    "AotReport",
    "CompileOptions",
    "Explanation",
    "GraphPass",
    "PassReport",
    "TPUBackendError",
    "TPUCacheError",
    "TPUCheckpointError",
    "TPUConfigurationError",
    "TPUDeviceError",
    "TPUDistributedError",
    "TPUMemoryError",
    "TPUMemoryManager",
    "TPUMemoryPoolError",
    "TPUModelPreparationError",
    "TPUNotAvailableError",
    "TPUOptimizationError",
    "TPUOutOfMemoryError",
    "TPUValidationError",
    "XLACompilationError",
    "XLACompilationTimeoutError",
    "__version__",
    "aot_compile",
    "cache_stats",
    "clear_cache",
    "explain",
    "kp_tpu",
]

_HOME_OF = {
    "AotReport": "kp_dynamo.aot.report",
    "CompileOptions": "kp_dynamo.options",
    "Explanation": "kp_dynamo.explanation",
    "GraphPass": "kp_dynamo.passes.base",
    "PassReport": "kp_dynamo.passes.base",
    "TPUMemoryManager": "kp_dynamo.runtime.memory",
    "aot_compile": "kp_dynamo.aot.compiling",
    "cache_stats": "kp_dynamo.backend",
    "clear_cache": "kp_dynamo.backend",
    "explain": "kp_dynamo.explanation",
    "kp_tpu": "kp_dynamo.backend",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
