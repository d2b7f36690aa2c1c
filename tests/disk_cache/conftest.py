"""The plugin, and the libraries built from the C files as they are now."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.disk_cache.process import HERE, NATIVE, Machine, build, build_library, plugin_folder


@pytest.fixture(scope="session")
def plugin() -> Path:
    folder = plugin_folder()
    if folder is None:
        pytest.fail(
            "XLA's CPU plugin is not installed. Try: make setup, or .venv/bin/python -m pip install xla-cpu-pjrt==0.0.1"
        )
    return folder


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    return build_library(tmp_path_factory.mktemp("library") / "library.so")


@pytest.fixture(scope="session")
def native(tmp_path_factory) -> Path:
    """The C files of the folder, whose functions Python can call, with system calls that fail on demand."""
    sources = [NATIVE / f"{name}.c" for name in ("entries", "eviction", "counters", "sha256")]
    path = tmp_path_factory.mktemp("native") / "native.so"
    return build(path, *sources, HERE / "failing_calls.c", visibility="default")


@pytest.fixture(scope="session")
def front(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("front") / "front.so", HERE / "front_plugin.c")


@pytest.fixture
def machine(tmp_path, library, front, plugin) -> Machine:
    folder = tmp_path / "programs"
    folder.mkdir(mode=0o700)
    return Machine(folder, library, front, plugin / "xla_cpu_pjrt.so")
