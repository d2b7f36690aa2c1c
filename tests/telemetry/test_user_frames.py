"""The user's line in a stack."""

import collections
import sys
from pathlib import Path

import pytest

import kp_dynamo
from kp_dynamo.telemetry.user_frames import user_frame, user_line


def frame_in(filename):
    """A frame of code in a file of that name, called by this test."""
    found = []
    source = "def f(): found.append(sys._getframe())\nf()"
    exec(compile(source, filename, "exec"), {"found": found, "sys": sys})
    return found[0]


PACKAGE = str(Path(kp_dynamo.__file__).parent)


@pytest.mark.parametrize("library", [f"{PACKAGE}/a.py", collections.__file__, "<frozen>", f"{Path(pytest.__file__)}"])
def test_libraries_are_left_out(library):
    assert user_frame(frame_in(library))[0] == __file__


@pytest.mark.parametrize("file", [f"{PACKAGE}_project/train.py", "/somewhere/train.py", "train.py"])
def test_the_innermost_frame_of_a_project_is_found(file):
    assert user_frame(frame_in(file)) == (file, 1, "f")


def test_without_a_frame_the_line_is_unknown():
    assert user_frame(None) is None
    assert user_line(None) == "an unknown line"


def test_a_file_that_cannot_be_read_has_no_text():
    assert user_line(("/nowhere/train.py", 3, "main")) == "/nowhere/train.py:3 in main"
