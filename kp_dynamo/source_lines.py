"""Where in the user's code a node came from."""

from __future__ import annotations

import re

from torch import fx

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def source_line(node: fx.Node) -> str:
    """ "model.py:12 in forward" for the innermost frame of a node's stack trace; "" where it has none."""
    frames = _FRAME.findall(node.stack_trace or "")
    return "{}:{} in {}".format(*frames[-1]) if frames else ""


def user_line(node: fx.Node) -> str:
    """ " (at model.py:12 in forward)" to append to a message; "" where the line is not known."""
    line = source_line(node)
    return f" (at {line})" if line else ""
