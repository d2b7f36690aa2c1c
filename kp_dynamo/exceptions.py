"""Every exception that this package raises deliberately.

A message says what was given, what is allowed and what to do next. The message is the only constructor argument, so
an exception can be pickled between processes and can be the `inner_exception` of torch's `BackendCompilerFailed`.
"""

from __future__ import annotations


class TPUBackendError(Exception):
    """Base class: `except TPUBackendError` catches every exception that this package raises."""


class TPUNotAvailableError(TPUBackendError):
    """torch_xla, its runtime or the requested kind of device is not available."""


class TPUDeviceError(TPUBackendError):
    """A device exists but cannot be used as requested: a wrong index, tensors on several devices, a fork."""


class TPUConfigurationError(TPUBackendError, ValueError):
    """An option, a setting or a combination of versions is not allowed."""


class TPUModelPreparationError(TPUBackendError):
    """A model cannot be moved to the device or prepared for it."""


class XLACompilationError(TPUBackendError):
    """A graph could not be compiled to an XLA program."""


class XLACompilationTimeoutError(XLACompilationError):
    """A compilation exceeded its time budget."""


class TPUMemoryError(TPUBackendError):
    """Device memory cannot be allocated, laid out or accounted for."""


class TPUOutOfMemoryError(TPUMemoryError):
    """A program or tensor needs more device memory than is available."""


class TPUMemoryPoolError(TPUMemoryError):
    """A memory pool is unknown or exhausted, or a tensor was returned to the wrong pool."""


class TPUCacheError(TPUBackendError):
    """A cache is misused: `XLACompiler` got a `use_cache` that is not a bool, or the disk cache cannot be enabled."""


class TPUOptimizationError(TPUBackendError):
    """A graph pass failed, or cannot do what was requested."""


class TPUValidationError(TPUBackendError, ValueError):
    """Validation rejected a model or configuration."""


class TPUDistributedError(TPUBackendError):
    """A collective or a device mesh cannot be used as requested."""


class TPUCheckpointError(TPUBackendError):
    """A model file could not be saved or loaded."""
