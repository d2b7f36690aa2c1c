"""The check that torch and torch_xla fit, on metadata that is made up."""

import subprocess
import sys
from importlib import metadata

import pytest

from kp_dynamo.compat.versions import check_versions, earlier_version
from kp_dynamo.exceptions import TPUConfigurationError, TPUNotAvailableError

CURE = 'pip install "torch==2.9.*" "torch_xla==2.9.*"'


def _install(monkeypatch, **versions):
    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("torch", "torch_xla"),
    [
        ("2.9.0", "2.9.0"),
        ("2.9.1", "2.9.0"),
        ("2.9.1+cpu", "2.9.0+libtpu"),
        ("2.9.0a0+git123", "2.9"),
        ("2.9", "2.9"),
        ("2.5.1+cu124", "2.5.1"),
        ("2.8.0", "2.8.1"),
    ],
)
def test_equal_minor_versions_pass(monkeypatch, torch, torch_xla):
    _install(monkeypatch, torch=torch, torch_xla=torch_xla)
    assert check_versions() == {"torch": torch, "torch_xla": torch_xla}


@pytest.mark.parametrize(
    ("torch", "torch_xla", "message"),
    [
        ("2.9.1", "2.8.1", "torch 2.9.1 with torch_xla 2.8.1 are of different minor versions"),
        ("2.10.0", "2.9.0", "torch 2.10.0 with torch_xla 2.9.0 are of different minor versions"),
        ("2.4.0", "2.4.0", "torch 2.4.0 with torch_xla 2.4.0 are not supported by this version of kp_tpu"),
        ("2.10.0", "2.10.0", "torch 2.10.0 with torch_xla 2.10.0 are not supported by this version of kp_tpu"),
        ("2.50.0", "2.50.0", "torch 2.50.0 with torch_xla 2.50.0 are not supported by this version of kp_tpu"),
        ("2.90.0", "2.90.0", "torch 2.90.0 with torch_xla 2.90.0 are not supported by this version of kp_tpu"),
        ("main", "main", "torch main with torch_xla main are not supported by this version of kp_tpu"),
    ],
)
def test_other_versions_raise_with_the_line_that_cures_it(monkeypatch, torch, torch_xla, message):
    _install(monkeypatch, torch=torch, torch_xla=torch_xla)
    with pytest.raises(TPUConfigurationError) as raised:
        check_versions()
    assert str(raised.value) == f"{message}; both must be 2.9.*; cure: {CURE}"


@pytest.mark.parametrize("missing", ["torch", "torch_xla"])
def test_a_missing_package_raises_with_the_line_that_cures_it(monkeypatch, missing):
    installed = {"torch": "2.9.1", "torch_xla": "2.9.0"}
    del installed[missing]
    _install(monkeypatch, **installed)
    with pytest.raises(TPUNotAvailableError) as raised:
        check_versions()
    assert str(raised.value).startswith(f"{missing} is not installed; kp_tpu needs torch and torch_xla, both 2.9.*")
    assert str(raised.value).endswith(CURE)


@pytest.mark.parametrize(
    ("installed", "error"),
    [
        ({"torch": "2.11.0"}, TPUNotAvailableError),
        ({"torch": "2.11.0", "torch_xla": "2.11.0"}, TPUConfigurationError),
        ({"torch": "2.9.1", "torch_xla": "2.11.0"}, TPUConfigurationError),
    ],
)
@pytest.mark.parametrize("native", ["torch_tpu", "torchtpu"])
def test_a_native_runtime_is_named(monkeypatch, installed, error, native):
    _install(monkeypatch, **installed, **{native: "0.3"})
    with pytest.raises(error, match=f"{native} 0.3 is installed: PyTorch's native `tpu` device") as raised:
        check_versions()
    assert str(raised.value).endswith(CURE)


def test_a_native_runtime_beside_what_works_is_no_error(monkeypatch):
    _install(monkeypatch, torch="2.9.1", torch_xla="2.9.0", torch_tpu="0.3")
    assert check_versions() == {"torch": "2.9.1", "torch_xla": "2.9.0"}


@pytest.mark.parametrize(
    ("version", "earlier"),
    [("2.5.1", "2.5.1"), ("2.8.0+x", "2.8.0+x"), ("2.9.0", None), ("2.4.0", None), ("2.10.0", None)],
)
def test_earlier_versions_are_distinguished_from_2_9(monkeypatch, version, earlier):
    _install(monkeypatch, torch_xla=version)
    assert earlier_version() == earlier
    _install(monkeypatch)
    assert earlier_version() is None


def test_the_check_imports_neither():
    code = "import sys; from kp_dynamo.compat.versions import check_versions; check_versions(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "kp_dynamo.compat.versions" in modules
    assert not {"torch", "torch_xla"} & set(modules)
