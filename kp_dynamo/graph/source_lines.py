"""Where in the user's code a node came from."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

from kp_dynamo.graph.module_paths import innermost_module

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Dynamo compiles what follows a graph break as a function of its own.
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


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
    found = innermost_module(node)
    if found is None:
        return ""
    path, kind = found
    return f"module {path} ({kind})" if path else f"module {kind}"


def frame_line(filename: str, line: object, function: str) -> str:
    """ "model.py:12 in forward", under the name that the user gave the function."""
    return "{}:{} in {}".format(filename, line, _RESUMED.sub(r"\1", function))


def user_line(node: fx.Node) -> str:
    """ " (at model.py:12 in forward)" to append to a message; "" where the line is not known."""
    line = source_line(node)
    return f" (at {line})" if line else ""
