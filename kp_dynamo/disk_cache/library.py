"""The shared library of `native/`: where it is, and its counters."""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from kp_dynamo.exceptions import TPUCacheError

# The reasons why a program was compiled although the cache is on, under the names that `native/cache.h` gives them.
MISSES = ("absent", "damaged", "unreadable", "not_loaded", "no_key", "dumped")

_MOST_BYTES = 2**64 - 1


def library_path() -> str:
    """The library that was built with the package.

    Raises:
        TPUCacheError: It was not built.
    """
    built = [Path(__file__).parent / f"_plugin{suffix}" for suffix in EXTENSION_SUFFIXES]
    for path in built:
        if path.is_file():
            return str(path)
    raise TPUCacheError(
        f"the disk cache's library {built[0].name} was not built, because there was no C compiler when kp_dynamo was "
        "installed. Try: install a C compiler (gcc or clang), then install kp_dynamo again from its source."
    )


def configure(path: str, plugin: str, folder: str, max_bytes: int) -> None:
    """Tell the library at `path`, before the device starts, which plugin is behind it and where programs are kept.

    Raises:
        TPUCacheError: It cannot be loaded, or is of another version of this package.
    """
    try:
        call = ctypes.CDLL(path).kp_cache_configure
    except (OSError, AttributeError) as cause:
        raise TPUCacheError(
            f"the disk cache's library {path} cannot be used: {cause}. It may be of another version of kp_dynamo. "
            "Try: install kp_dynamo again from its source."
        ) from cause
    call.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64)
    call(os.fsencode(plugin), os.fsencode(folder), min(max_bytes, _MOST_BYTES))


def state(path: str) -> str:
    """ "on", or why the library that this process loaded from `path` does not work."""
    library = ctypes.CDLL(path)
    library.kp_cache_state.restype = ctypes.c_char_p
    reason = library.kp_cache_state()
    return "on" if reason is None else reason.decode()


def counters(path: str) -> dict[str, int]:
    """The counters of the library that this process loaded from `path`, by name."""
    library = ctypes.CDLL(path)
    library.kp_cache_counter_name.restype = ctypes.c_char_p
    library.kp_cache_counter.restype = ctypes.c_uint64
    found: dict[str, int] = {}
    while (name := library.kp_cache_counter_name(len(found))) is not None:
        found[name.decode()] = library.kp_cache_counter(len(found))
    return found
