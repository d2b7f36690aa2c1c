"""Which plugin torch_xla loads for a device, and what takes its place."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kp_dynamo.compat import importing, pjrt_plugins
from kp_dynamo.exceptions import TPUCacheError


def test_a_plugin_that_torch_xla_registers_at_its_import(tmp_path, monkeypatch):
    """The plugin of an installed package, before the process has used torch_xla."""
    plugin = tmp_path / "plugin.so"
    plugin.touch()
    registry: dict[str, SimpleNamespace] = {}

    def load():
        registry["CPUP"] = SimpleNamespace(library_path=lambda: str(plugin))

    monkeypatch.setenv("PJRT_DEVICE", "CPUP")
    monkeypatch.setattr(importing, "load", load)
    module = SimpleNamespace(_plugin_registry=registry)
    monkeypatch.setitem(sys.modules, "torch_xla.experimental.plugins", module)
    assert pjrt_plugins.plugin_behind("library.so") == str(plugin)


def test_a_device_without_a_registered_plugin(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPUP")
    monkeypatch.setattr(importing, "load", lambda: None)
    with pytest.raises(TPUCacheError, match=r"no plugin is registered for PJRT_DEVICE='CPUP'\. Try: register it"):
        pjrt_plugins.plugin_behind("library.so")


@pytest.mark.parametrize("behind", [None, "given"])
def test_the_library_of_another_installation_is_no_plugin(tmp_path, monkeypatch, behind):
    """A parent process put it in front of libtpu. The library of this process takes its place."""
    theirs, libtpu = tmp_path / "theirs.so", tmp_path / "libtpu.so"
    theirs.write_bytes(b"\x7fELF kp_cache_state\0")
    libtpu.touch()
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(theirs))
    monkeypatch.setenv("PTXLA_TPU_LIBRARY_PATH", str(tmp_path / "none.so") if behind else str(libtpu))
    assert pjrt_plugins.plugin_behind("ours.so", behind and str(libtpu)) == str(libtpu)


def test_a_plugin_that_forwards_to_nothing(tmp_path, monkeypatch):
    theirs = tmp_path / "theirs.so"
    theirs.write_bytes(b"\x7fELF kp_cache_state\0")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(theirs))
    monkeypatch.delenv("PTXLA_TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(TPUCacheError, match="the PJRT plugin of PJRT_DEVICE=TPU was not found"):
        pjrt_plugins.plugin_behind("ours.so")
