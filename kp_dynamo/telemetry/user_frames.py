"""The user's line in a stack: the innermost frame that is neither in a library nor in this package."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import torch

TORCH = os.path.join(Path(torch.__file__).parent, "")
_FOLDERS = {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1])}
# With a separator at the end: a project beside this package may have a name that begins with that of the package.
_LIBRARIES = (*(os.path.join(folder, "") for folder in _FOLDERS), "<")


def user_frame(frame: FrameType | None) -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame of the user's, else of the innermost one outside torch.

    It reads no file, so it is cheap enough for the user's thread.
    """
    outside_torch = None
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_LIBRARIES):
            return code.co_filename, frame.f_lineno, code.co_name
        if outside_torch is None and not code.co_filename.startswith((TORCH, "<")):
            outside_torch = code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return outside_torch


def user_line(found: tuple[str, int, str] | None) -> str:
    """ "train.py:12 in main: loss.backward()"; "an unknown line" if there is no frame."""
    if found is None:
        return "an unknown line"
    file, line, function = found
    text = linecache.getline(file, line).strip()
    return f"{file}:{line} in {function}" + (f": {text}" if text else "")


def frame_of(thread: int) -> FrameType | None:
    """What a thread runs now; None if it has ended."""
    return sys._current_frames().get(thread)


def stack_text(thread: int) -> str:
    """The stack of a thread as Python prints it, without the frames of torch."""
    frame = frame_of(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    return "".join(traceback.format_list([line for line in stack if not line.filename.startswith((TORCH, "<"))]))
