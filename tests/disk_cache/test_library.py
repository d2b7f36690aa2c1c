"""The library that was built with the package, and installs without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from kp_dynamo.disk_cache import library as built
from tests.disk_cache.process import ROOT

NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__", "*.egg-info", "*.so")


def test_the_package_has_its_library(library):
    """Built from the C files as they are now, as far as its counters show."""
    path = built.library_path()  # its error says how to build it
    assert built.state(path) == "no device has started"
    assert list(built.counters(path)) == list(built.counters(str(library)))
    assert set(built.MISSES) < set(built.counters(path))


@pytest.mark.quick("build_wheel")
@pytest.mark.parametrize(("hook", "compiler"), [("build_wheel", "/nowhere/cc"), ("build_editable", "false")])
def test_without_a_compiler_the_package_installs(tmp_path, hook, compiler):
    """pip calls these hooks of setuptools. The compiler is missing, or fails."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_SOURCES)
    code = f"from setuptools import build_meta; build_meta.{hook}({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env={**os.environ, "CC": compiler}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == []
    assert "building extension" in done.stdout + done.stderr  # it was tried
