"""Kernels that C++ extensions register for torch's operators.

A capture that outlives its process may contain what such a kernel computes, which a process without the extension must
not load. torch has no list of them: its dispatcher describes each operator as text, with the place of each kernel.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_PLACE = re.compile(r"registered at (.*?):\d+ ")
# The first file is one of torch's, which its build keeps in this folder.
_SCHEMA = re.compile(r"debug: registered at (.*)build/aten/src/ATen/RegisterSchema\.cpp")


def foreign_kernels() -> tuple[str, ...]:
    """The source files of such kernels, other than those of torch and torch_xla."""
    return _foreign_kernels(_num_loaded_libraries())


@lru_cache(maxsize=1)
def _foreign_kernels(num_loaded: int) -> tuple[str, ...]:
    """Those of the process; a kernel comes with a library, so the number of libraries tells when to look again."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    text = "\n".join(map(torch._C._dispatch_dump, names))
    built = _SCHEMA.search(text)
    return tuple(sorted(place for place in set(_PLACE.findall(text)) if not _is_known(place, built)))


def _is_known(place: str, built: re.Match[str] | None) -> bool:
    """Whether a file is of torch or torch_xla, or of Python, whose kernels `torch_tables.py` knows."""
    is_of_torch = built is not None and place.startswith(built[1])
    return is_of_torch or "torch_xla/csrc/" in place or place.endswith(".py")


class _Libraries(ctypes.Structure):
    """The beginning of `struct dl_phdr_info`."""

    _fields_ = (
        ("address", ctypes.c_void_p), ("name", ctypes.c_char_p), ("headers", ctypes.c_void_p),
        ("num_headers", ctypes.c_uint16), ("num_loaded", ctypes.c_ulonglong),
    )  # fmt: skip


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Libraries), ctypes.c_size_t, ctypes.c_void_p)


def _num_loaded_libraries() -> int:
    """How many shared libraries this process has loaded so far."""
    found: list[int] = []

    def first(info: Any, size: int, data: int | None) -> int:
        found.append(info[0].num_loaded)
        return 1

    # PyDLL keeps the GIL: the loader holds its lock meanwhile, for which another thread may wait with the GIL.
    iterate: Callable[..., int] = ctypes.PyDLL(None).dl_iterate_phdr
    iterate(_CALLBACK(first), None)
    return found[0]
