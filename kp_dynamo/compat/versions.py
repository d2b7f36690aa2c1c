"""Check from package metadata, without importing them, whether torch and torch_xla fit together.

torch_xla is built against one minor version of torch, but pip does not check that. A mismatch appears as an undefined
symbol in the middle of an import, or not at all.
"""

from __future__ import annotations

import re
from importlib import metadata

from kp_dynamo.exceptions import TPUConfigurationError, TPUNotAvailableError

SUPPORTED_MINOR = "2.9"
EARLIER_MINORS = ("2.5", "2.6", "2.7", "2.8")
"""Versions that only support torch_xla's own lowering; see `kp_dynamo.legacy_backend`."""
PACKAGES = ("torch", "torch_xla")
CURE = "pip install " + " ".join(f'"{name}=={SUPPORTED_MINOR}.*"' for name in PACKAGES)

# Distributions of PyTorch's native TPU backend, which does not use torch_xla.
_NATIVE = ("torch_tpu", "torchtpu")
_MINOR = re.compile(r"(\d+\.\d+)(?:\D|$)")


def version_of(distribution: str) -> str:
    """The version of an installed distribution; "" if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def check_versions() -> dict[str, str]:
    """Check that torch and torch_xla fit together, and return their versions by name.

    Raises:
        TPUNotAvailableError: One of them is not installed.
        TPUConfigurationError: Their minor versions differ or are unsupported.
    """
    found = {name: _installed(name) for name in PACKAGES}
    minors = {_minor(version) for version in found.values()}
    if len(minors) == 1 and minors <= {SUPPORTED_MINOR, *EARLIER_MINORS}:
        return found
    given = " with ".join(f"{name} {version}" for name, version in found.items())
    problem = "are of different minor versions" if len(minors) > 1 else "are not supported by this version of kp_tpu"
    raise TPUConfigurationError(
        f"{given} {problem}; both must be {SUPPORTED_MINOR}.*{native_runtime_hint()}; cure: {CURE}"
    )


def earlier_version() -> str | None:
    """The version of torch_xla if it is one of `EARLIER_MINORS`, else None."""
    version = version_of("torch_xla")
    return version if _minor(version) in EARLIER_MINORS else None


def native_runtime_hint() -> str:
    """A hint for messages if PyTorch's native TPU backend is installed; "" if it is not."""
    for name in _NATIVE:
        if version := version_of(name):
            return (
                f" ({name} {version} is installed: PyTorch's native `tpu` device, which this version of kp_tpu does "
                "not support; it uses torch_xla)"
            )
    return ""


def _installed(name: str) -> str:
    if version := version_of(name):
        return version
    raise TPUNotAvailableError(
        f"{name} is not installed{native_runtime_hint()}; kp_tpu needs {' and '.join(PACKAGES)}, both "
        f"{SUPPORTED_MINOR}.*; cure: {CURE}"
    )


def _minor(version: str) -> str:
    """ "2.9" for "2.9.1+cpu". Text that is not a version is returned whole, and then matches no version."""
    match = _MINOR.match(version)
    return match[1] if match else version
