"""Do torch and torch_xla fit? Read from package metadata, so that neither is imported.

torch_xla is built against one minor version of torch and pip does not check it: a mismatch shows as an
undefined symbol in the middle of an import, or not at all.
"""

from __future__ import annotations

import re
from importlib import metadata

from kp_dynamo.exceptions import TPUConfigurationError, TPUNotAvailableError

SUPPORTED_MINOR = "2.9"
PACKAGES = ("torch", "torch_xla")
CURE = "pip install " + " ".join(f'"{name}=={SUPPORTED_MINOR}.*"' for name in PACKAGES)

_MINOR = re.compile(r"(\d+\.\d+)(?:\D|$)")


def check_versions() -> dict[str, str]:
    """The installed versions of torch and torch_xla by name, after seeing that they work together.

    Raises:
        TPUNotAvailableError: One of them is not installed.
        TPUConfigurationError: They are of different minor versions, or of one we do not support.
    """
    found = {name: _installed(name) for name in PACKAGES}
    minors = {_minor(version) for version in found.values()}
    if minors == {SUPPORTED_MINOR}:
        return found
    given = " with ".join(f"{name} {version}" for name, version in found.items())
    problem = "are of different minor versions" if len(minors) > 1 else "are not supported by this version of kp_tpu"
    raise TPUConfigurationError(f"{given} {problem}; both must be {SUPPORTED_MINOR}.*; cure: {CURE}")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError as cause:
        raise TPUNotAvailableError(
            f"{name} is not installed; kp_tpu needs {' and '.join(PACKAGES)}, both {SUPPORTED_MINOR}.*; cure: {CURE}"
        ) from cause


def _minor(version: str) -> str:
    """ "2.9" of "2.9.1+cpu"; the whole text where it is no version, which then fits nothing."""
    match = _MINOR.match(version)
    return match[1] if match else version
