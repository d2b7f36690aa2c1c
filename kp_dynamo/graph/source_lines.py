"""The location in the user's code that a node was traced from."""

from __future__ import annotations

import os
import re

import torch
from torch import fx

from kp_dynamo.graph.module_paths import module_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Dynamo compiles the code after a graph break as a separate function.
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")


def source_line(node: fx.Node) -> str:
    """ "model.py:12 in forward" for the innermost frame outside torch of a node's stack trace.

    If all code is torch's, as in an nn.Sequential, "module layers.0 (Linear)"; "" if the origin is unknown.
    """
    frames = _FRAME.findall(node.stack_trace or "")
    of_user = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    if of_user:
        return frame_line(*of_user[-1])
    module = module_of(node)
    return f"module {module}" if module else (frame_line(*frames[-1]) if frames else "")


def frame_line(filename: str, line: object, function: str) -> str:
    """ "model.py:12 in forward", with the name of the function in the user's code."""
    return "{}:{} in {}".format(filename, line, _RESUMED.sub(r"\1", function))


def user_line(node: fx.Node) -> str:
    """ " (at model.py:12 in forward)" to append to a message; "" if the line is unknown."""
    line = source_line(node)
    return f" (at {line})" if line else ""
