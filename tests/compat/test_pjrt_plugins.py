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
