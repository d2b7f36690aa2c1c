"""Every exception this package raises on purpose.

A message says what was given, what is allowed and what to do next. The classes take that message and
nothing else, so that they travel between processes (pickle) and through torch's
`BackendCompilerFailed`, whose `inner_exception` they become.
"""

from __future__ import annotations


class TPUBackendError(Exception):
    """Root of all of them: `except TPUBackendError` catches whatever we raise."""


class TPUNotAvailableError(TPUBackendError):
    """torch_xla, its runtime or the requested kind of device is not there."""


class TPUDeviceError(TPUBackendError):
    """A device exists but cannot be used as asked: a wrong index, tensors on several devices, a fork."""


class TPUConfigurationError(TPUBackendError, ValueError):
    """An option, a setting or a combination of versions that is not allowed."""


class TPUModelPreparationError(TPUBackendError):
    """A model cannot be moved to the device or made ready for it."""


class XLACompilationError(TPUBackendError):
    """A graph could not be turned into an XLA program."""


class XLACompilationTimeoutError(XLACompilationError):
    """A compilation took longer than the budget it was given."""


class TPUMemoryError(TPUBackendError):
    """Device memory cannot be given out, laid out or accounted for."""


class TPUOutOfMemoryError(TPUMemoryError):
    """A program or tensor needs more device memory than there is."""


class TPUMemoryPoolError(TPUMemoryError):
    """A memory pool is unknown, exhausted, or was handed a tensor that is not its own."""


class TPUCacheError(TPUBackendError):
    """A cache could not be read or written, or holds what it should not."""


class TPUOptimizationError(TPUBackendError):
    """A graph pass failed, or was asked for something it cannot do."""


class TPUValidationError(TPUBackendError, ValueError):
    """A model or configuration was found wrong by validation."""


class TPUDistributedError(TPUBackendError):
    """A collective or a mesh of several devices cannot be used as asked."""


class TPUCheckpointError(TPUBackendError):
    """A model file could not be saved or loaded."""
