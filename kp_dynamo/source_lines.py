"""Where in the user's code a node came from."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Dynamo compiles what follows a graph break as a function of its own.
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


# Words of Dynamo's `L['self']._modules['layers']._modules['0']` that are no part of a module's path.
_NOT_IN_PATHS = ("L", "G", "self", "fn", "_modules", "_orig_mod")


def source_line(node: fx.Node) -> str:
    """ "model.py:12 in forward" for the innermost frame outside torch of a node's stack trace.

    Where all code is torch's, as of an nn.Sequential, "module layers.0 (Linear)"; "" where there is nothing to tell.
    """
    frames = _FRAME.findall(node.stack_trace or "")
    of_user = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    if of_user:
        return frame_line(*of_user[-1])
    return _module(node) or (frame_line(*frames[-1]) if frames else "")


def _module(node: fx.Node) -> str:
    """The innermost module that a node, or the forward of a node of a backward, was traced in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    source, kind = list(stack.values())[-1]
    path = ".".join(word for word in re.findall(r"\w+", source) if word not in _NOT_IN_PATHS)
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return f"module {path} ({name})" if path else f"module {name}"


def frame_line(filename: str, line: object, function: str) -> str:
    """ "model.py:12 in forward", under the name that the user gave the function."""
    return "{}:{} in {}".format(filename, line, _RESUMED.sub(r"\1", function))


def user_line(node: fx.Node) -> str:
    """ " (at model.py:12 in forward)" to append to a message; "" where the line is not known."""
    line = source_line(node)
    return f" (at {line})" if line else ""
