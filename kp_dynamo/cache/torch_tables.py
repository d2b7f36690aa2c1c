"""Python functions that torch calls for its operators when a graph is traced, which a user may replace.

They are torch's decompositions, and the kernels that Python registers for operators. A capture that outlives its
process depends on them.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kp_dynamo.cache.graph_text import is_of_torch
from kp_dynamo.cache.identity import is_of_library
from kp_dynamo.cache.native_kernels import foreign_kernels

_LIBRARIES = ("torch", "torch_xla", "kp_dynamo")
# Torch itself registers kernels in Python for shapes, and for vmap at its first use.
_OF_TORCH = ("/Meta", "/FuncTorchBatched")
_META = torch._C.DispatchKey.Meta
# What torch_xla and this package register.
_KNOWN_KERNELS = frozenset((
    "aten/upsample_trilinear3d/XLA", "aten/native_layer_norm/AutogradXLA",
    "aten/scaled_dot_product_attention/AutocastXLA", "aten/_to_cpu/TESTING_ONLY_GenericMode",
    "aten/_local_scalar_dense/TESTING_ONLY_GenericMode",
))  # fmt: skip


@dataclass(frozen=True)
class TorchFunctions:
    """The decompositions and Python kernels of torch's operators.

    Attributes:
        digest: Of their names and places. A user may also put a function of torch in the place of another one.
        replaced: Those that are not of a library whose version is in the key, and kernels of C++ extensions.
    """

    digest: str
    replaced: tuple[str, ...]


def torch_functions() -> TorchFunctions:
    """Those that are registered now."""
    found = [(name, _place_if_known(function)) for name, function in _functions()]
    digest = hashlib.sha256("\n".join(f"{name} {place}" for name, place in sorted(found, key=str)).encode())
    foreign = [name for name, place in found if place is None]
    return TorchFunctions(digest.hexdigest(), (*sorted(_registered_kernels()), *foreign_kernels(), *foreign))


def _registered_kernels() -> set[str]:
    """Those by `torch.library` for operators of torch, such as "aten/gelu/CPU"."""
    registered = torch.library._impls
    return {n for n in registered if n.startswith("aten/") and not n.endswith(_OF_TORCH)} - _KNOWN_KERNELS


def _functions() -> Iterator[tuple[str, Any]]:
    """Name -> function. Those for shapes, on the meta device, compute no value.

    Each table is copied first: another thread may import a module that registers more.
    """
    for kind in ("post_autograd", "pre_autograd"):
        table = torch._decomp.global_decomposition_table[kind]
        yield from ((f"{kind} {name}", f) for op, f in list(table.items()) if (name := _name_in_torch(op)))
    for packet in list(vars(torch.ops.aten).values()):
        for op in list(vars(packet).values()) if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            if isinstance(op, torch._ops.OpOverload):
                kernels = [(key, kernel) for key, kernel in list(op.py_kernels.items()) if key is not _META]
                yield from ((f"{key.name} {_name_in_torch(op)}", kernel) for key, kernel in kernels)


def _place_if_known(function: Any) -> str | None:
    try:
        return _place_of(function)
    except TypeError:  # an object without a hash is no function of a library
        return None


@cache
def _place_of(function: Any) -> str | None:
    """Where a function and all that it wraps are defined, in libraries; None if any is defined elsewhere."""
    places = []
    while (code := getattr(function, "__code__", None)) is not None:
        library = next((name for name in _LIBRARIES if code.co_filename.startswith(_folder(name))), None)
        if library is None:
            return None
        places.append(f"{library} {code.co_qualname} {code.co_firstlineno}")
        function = getattr(function, "__wrapped__", None)
    if function is None:
        return " of ".join(places)
    if is_of_torch(function) or isinstance(function, torch._C.DispatchKey):
        return " of ".join([*places, str(function)])
    if inspect.isbuiltin(function) and is_of_library(function):
        return " of ".join([*places, f"{function.__module__} {function.__qualname__}"])
    return None


@cache
def _name_in_torch(op: Any) -> str:
    """The name of an operator of torch; "" for any other."""
    return str(op) if is_of_torch(op) else ""


def _folder(library: str) -> str:
    path = sys.modules[library].__file__ if library in sys.modules else None
    return os.path.dirname(path) + os.sep if path else "\0"
