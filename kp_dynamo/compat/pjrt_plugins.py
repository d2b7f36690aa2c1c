"""The shared library that torch_xla 2.9 loads for a device, and how to put another one in front of it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from kp_dynamo.compat import fast_extremes
from kp_dynamo.exceptions import TPUCacheError

_TPU_LIBRARY = "TPU_LIBRARY_PATH"
_DEFAULT_TPU_LIBRARY = "PTXLA_TPU_LIBRARY_PATH"  # what torch_xla 2.9 loads without the other
# Each build of the library in front exports it, and is far smaller than a plugin.
_EXPORTED_BY_OURS, _MOST_BYTES_OF_OURS = b"kp_cache_state", 1 << 22


def require_plugin() -> None:
    """Raise if the device of this process has no plugin.

    Raises:
        TPUCacheError: It is XLA:CPU.
    """
    if fast_extremes.is_on_cpu():
        raise TPUCacheError(
            "there are no programs to keep on this device: XLA:CPU is a part of torch_xla and cannot load compiled "
            "programs. Allowed: a TPU, or a device whose PJRT plugin is registered with torch_xla."
        )


def is_in_front(library: str) -> bool:
    """Whether torch_xla loads `library` for the device of this process, or has loaded it."""
    name = os.environ.get("PJRT_DEVICE", "TPU")
    plugin = _registered(name)
    current = os.environ.get(_TPU_LIBRARY, "") if name == "TPU" else plugin.library_path() if plugin else ""
    return os.path.realpath(current) == os.path.realpath(library)


def is_tpu() -> bool:
    """Whether torch_xla would load libtpu for this process."""
    return os.environ.get("PJRT_DEVICE", "TPU") == "TPU"


def plugin_behind(library: str, behind: str | None = None) -> str:
    """The path of the plugin that torch_xla would load without `library`.

    Args:
        library: A PJRT plugin that forwards to another one.
        behind: The plugin behind `library`, if this process or its parent has put it in front before.

    Raises:
        TPUCacheError: The plugin of this process's device was not found.
    """
    name = os.environ.get("PJRT_DEVICE", "TPU")
    registered = _registered(name)
    if name != "TPU" and registered is None:
        raise TPUCacheError(
            f"no plugin is registered for PJRT_DEVICE={name!r}. Try: register it with "
            "torch_xla.experimental.plugins.register_plugin before kp_dynamo.enable_disk_cache()."
        )
    current = registered.library_path() if registered else _libtpu_path()
    if is_in_front(library) or _is_of_this_package(current):
        current = behind or (os.environ.get(_DEFAULT_TPU_LIBRARY, "") if name == "TPU" else "")
    if not os.path.isfile(current):
        raise TPUCacheError(f"the PJRT plugin of PJRT_DEVICE={name} was not found (looked for {current!r}).")
    return current


def _is_of_this_package(library: str) -> bool:
    """Whether a library is one that forwards, perhaps of another installation that a parent process used."""
    with contextlib.suppress(OSError):
        return os.path.getsize(library) < _MOST_BYTES_OF_OURS and _EXPORTED_BY_OURS in Path(library).read_bytes()
    return False


def put_in_front(library: str, plugin: str) -> None:
    """Make torch_xla load `library`, for a device whose `plugin` was found by `plugin_behind`.

    Child processes inherit the place of libtpu, and the path of libtpu, whether or not they use the cache.
    """
    registered = _registered(os.environ.get("PJRT_DEVICE", "TPU"))
    if registered is None:
        os.environ.update({_TPU_LIBRARY: library, _DEFAULT_TPU_LIBRARY: plugin})
    else:
        # torch_xla's C++ code asks the object, whose class belongs to its package.
        registered.library_path = lambda: library


def leave_front(library: str) -> None:
    """Make torch_xla load libtpu itself, if a parent process has put `library` in front of it."""
    if os.path.realpath(os.environ.get(_TPU_LIBRARY, "")) != os.path.realpath(library):
        return
    if plugin := os.environ.get(_DEFAULT_TPU_LIBRARY):
        os.environ[_TPU_LIBRARY] = plugin
    else:
        del os.environ[_TPU_LIBRARY]


def _registered(name: str) -> Any:
    """The plugin object of a device other than a TPU. torch_xla finds libtpu by a variable, with or without one."""
    if name == "TPU":
        return None
    from kp_dynamo.compat import importing  # it imports torch, which an import of this package does not need

    importing.load()  # torch_xla then registers the plugins of installed packages
    plugins = sys.modules.get("torch_xla.experimental.plugins")
    return getattr(plugins, "_plugin_registry", {}).get(name.upper())


def _libtpu_path() -> str:
    """The libtpu that torch_xla 2.9 would load: the user's, the one in its folder, or the package libtpu."""
    if path := os.environ.get(_TPU_LIBRARY) or os.environ.get(_DEFAULT_TPU_LIBRARY):
        return path
    spec = importlib.util.find_spec("torch_xla")
    bundled = Path(spec.origin).parent / "lib" / "libtpu.so" if spec and spec.origin else None
    if bundled is not None and bundled.is_file():
        return str(bundled)
    spec = importlib.util.find_spec("libtpu")
    return str(Path(spec.origin).parent / "libtpu.so") if spec and spec.origin else ""
