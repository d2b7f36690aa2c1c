"""The key of a capture as text that means the same in every process, for a capture that outlives its process.

The numbers of `identity.py` count the objects of one process. Here, a function is its name, if torch or this package
defines it there: their versions are part of the key. Anything else has no such name.
"""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from kp_dynamo.cache.compile_key import Parts
from kp_dynamo.cache.graph_text import callable_text, graph_text, is_at_its_name, is_of_torch
from kp_dynamo.cache.identity import Uncacheable

_LIBRARIES = ("torch", "kp_dynamo")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+|<[\w.]+ object")


@dataclass(frozen=True)
class LastingText:
    """A text of a graph that means the same in every process, or the reason why the graph has no such text."""

    text: str = ""
    refusal: str = ""


def lasting_text(gm: fx.GraphModule, *, with_modules: bool) -> LastingText:
    """As `graph_text`, for other processes too."""
    try:
        return LastingText(graph_text(gm, with_modules=with_modules, function=_lasting))
    except Uncacheable as refusal:
        return LastingText(refusal=str(refusal))


def key_text(graph: str, parts: Parts) -> str:
    """All parts of a key, one a line; `graph` replaces the part of that name.

    Raises:
        Uncacheable: A part names an address.
    """
    others = "\n".join(f"{name}: {value!r}" for name, value in parts if name != "graph")
    text = f"{others}\n{graph}"
    if (found := _ADDRESS.search(text)) is not None:
        raise Uncacheable(f"its key has an address: {found[0]}")
    return text


def _lasting(value: Any) -> str:
    """The text of an operator or a function.

    Raises:
        Uncacheable: It is not one that torch or this package defines at its name.
    """
    if isinstance(value, torch._ops.HigherOrderOperator):
        if not _is_of(type(value).__module__, "torch"):
            raise Uncacheable(f"a user-defined higher-order operator {value}")
        return str(value)
    if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        if not is_of_torch(value):
            raise Uncacheable(f"{value} is a user-defined operator")
        return str(value)
    if isinstance(value, types.FunctionType):
        return _function(value)
    if isinstance(value, types.BuiltinFunctionType):
        return callable_text(value)
    raise Uncacheable(f"an argument of type {type(value).__name__}")


def _function(value: types.FunctionType) -> str:
    """A library's function by its name. A user may have put another one there, even one that claims to be of torch."""
    owner = next((name for name in _LIBRARIES if _is_of(value.__module__, name)), None)
    if owner is None or not is_at_its_name(value) or not _is_inside(value.__code__.co_filename, owner):
        raise Uncacheable(f"the function {value.__module__}.{value.__qualname__}")
    return f"{value.__module__}.{value.__name__}"


def _is_inside(filename: str, package: str) -> bool:
    folder = sys.modules[package].__file__
    return folder is not None and Path(filename).is_relative_to(Path(folder).parent)


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
