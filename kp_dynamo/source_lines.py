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


def source_line(node: fx.Node) -> str:
    """ "model.py:12 in forward" for the innermost frame outside torch of a node's stack trace; "" where it has none."""
    frames = _FRAME.findall(node.stack_trace or "")
    of_user = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return frame_line(*(of_user or frames)[-1]) if frames else ""


def frame_line(filename: str, line: object, function: str) -> str:
    """ "model.py:12 in forward", under the name that the user gave the function."""
    return "{}:{} in {}".format(filename, line, _RESUMED.sub(r"\1", function))


def user_line(node: fx.Node) -> str:
    """ " (at model.py:12 in forward)" to append to a message; "" where the line is not known."""
    line = source_line(node)
    return f" (at {line})" if line else ""
