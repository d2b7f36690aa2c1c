"""What `aot_compile` refuses, and what it says; afterwards the process compiles the next model."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from torch import nn

import kp_dynamo
from kp_dynamo.aot import worker_process
from kp_dynamo.exceptions import (
    TPUConfigurationError,
    TPUModelPreparationError,
    TPUNotAvailableError,
    TPUOutOfMemoryError,
    XLACompilationError,
    XLACompilationTimeoutError,
)

ROW = (torch.ones(4, 8),)


def refused(kind: type[Exception], match: str, *args: object, **how: object) -> None:
    """The call fails as said, and the next one works."""
    with pytest.raises(kind, match=match):
        kp_dynamo.aot_compile(*args, **how)
    assert kp_dynamo.aot_compile(torch.sin, (torch.ones(2),)).programs


def test_an_unknown_target_names_the_nearest():
    refused(
        TPUConfigurationError,
        r"target='v5' is unknown; did you mean 'v5[ep]'\? Allowed: v4, v5e",
        torch.sin,
        ROW,
        target="v5",
    )


def test_two_targets():
    refused(
        TPUConfigurationError,
        "target='v5e' conflicts with the option target='v4'",
        torch.sin,
        ROW,
        options={"target": "v4"},
    )


def test_an_unknown_backend():
    refused(TPUConfigurationError, "Allowed: kp_tpu, openxla", torch.sin, ROW, backend="inductor")
    says = "backend='openxla' has no option 'level'. Allowed: target, memory_fraction"
    refused(TPUConfigurationError, says, torch.sin, ROW, backend="openxla", options={"level": "aggressive"})


def test_an_unknown_option():
    refused(TPUConfigurationError, "did you mean 'level'", torch.sin, ROW, options={"levle": "balanced"})


@pytest.mark.parametrize("args", [torch.ones(2), None, 3])
def test_arguments_that_are_no_tuple(args):
    refused(TPUModelPreparationError, r"such as \(tokens,\)", torch.sin, args)


def test_a_model_that_cannot_be_called():
    refused(TPUModelPreparationError, "it is not callable", 3, ROW)


def test_a_model_that_cannot_be_copied():
    class Stubborn(nn.Linear):
        def __deepcopy__(self, memo: object) -> None:
            raise RuntimeError("no copies")

    refused(TPUModelPreparationError, "no copies.*needs a copy", Stubborn(8, 8), ROW)


def test_a_lazy_module():
    refused(TPUModelPreparationError, "weight has no shape yet", nn.LazyLinear(4), ROW)


def test_a_shape_that_depends_on_values():
    refused(XLACompilationError, "do not depend on values", lambda x: x[x > 0].sum() + x.nonzero().shape[0], ROW)


def test_a_branch_on_a_value():
    refused(
        XLACompilationError, "cannot be traced ahead of time", lambda x: x.sin() if bool(x.sum() > 0) else x.cos(), ROW
    )


def replace_data(p):
    p.data = p.data * 0.5
    return p * 2


def test_data_that_is_replaced():
    with pytest.raises(XLACompilationError, match=r"by set_ \(at .* in replace_data\).* Allowed: x\.data\.copy_"):
        kp_dynamo.aot_compile(replace_data, (torch.ones(3),))


def test_a_model_that_raises():
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("my own mistake")

    refused(XLACompilationError, "my own mistake", broken, ROW)


def test_nothing_to_compile():
    refused(XLACompilationError, "no operation", lambda x: 3, ROW)


def test_no_room_is_known_before_the_compile():
    with torch.device("meta"):
        big = nn.Linear(50_000, 50_000)
    start = time.perf_counter()
    match = r"at least 10\.0. GB.*Allowed: 7\.20 GB.*v5p"
    args = (torch.ones(1, 50_000, device="meta"),)
    refused(TPUOutOfMemoryError, match, big, args, options={"memory_fraction": 0.45})
    assert time.perf_counter() - start < 60


def test_no_room_for_temporaries_is_the_compilers_word():
    def scores(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.T, -1).sort(-1).values @ x

    refused(TPUOutOfMemoryError, "does not fit the memory of a v5e", scores, (torch.ones(80_000, 8, device="meta"),))


def test_the_time_is_over():
    refused(XLACompilationTimeoutError, "exceeded its time limit", nn.Linear(8, 8), ROW, timeout_s=0.001)


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(worker_process, "_environment", lambda folder: {"PYTHONPATH": folder, "PYTHONHOME": folder})
    with pytest.raises(TPUNotAvailableError, match=r'pip install "kp_dynamo\[tpu\]"'):
        kp_dynamo.aot_compile(nn.Linear(8, 8), ROW)


def test_jax_is_missing(monkeypatch, tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('no jax here')")
    real = worker_process._environment
    monkeypatch.setattr(worker_process, "_environment", lambda folder: {**real(folder), "PYTHONPATH": str(tmp_path)})
    with pytest.raises(TPUNotAvailableError, match=r"no jax here.*kp_dynamo"):
        kp_dynamo.aot_compile(nn.Linear(8, 8), ROW)


def test_v7_says_what_to_install(monkeypatch):
    monkeypatch.setenv("KP_TPU_V7_PYTHON", "/no/such/python")
    with pytest.raises(TPUNotAvailableError, match=r"make aot-v7.*KP_TPU_V7_PYTHON"):
        kp_dynamo.aot_compile(nn.Linear(8, 8), ROW, target="v7")


def test_v7_loads_its_own_libtpu(monkeypatch, tmp_path):
    """torch_xla sets TPU_LIBRARY_PATH in this process, to a libtpu that does not know a v7."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "{\\"failed\\": \\"library ${TPU_LIBRARY_PATH-unset}\\"}"\n')
    python.chmod(0o755)
    monkeypatch.setenv("KP_TPU_V7_PYTHON", str(python))
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/of/another/environment.so")
    with pytest.raises(TPUNotAvailableError, match="library unset"):
        kp_dynamo.aot_compile(nn.Linear(8, 8), ROW, target="v7")


def test_a_worker_that_dies_is_an_error_with_its_last_words(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit('my last words')")
    monkeypatch.setattr(worker_process, "_WORKER", worker)
    with pytest.raises(TPUNotAvailableError, match="my last words"):
        kp_dynamo.aot_compile(nn.Linear(8, 8), ROW)


def test_the_worker_stands_alone():
    source = worker_process._WORKER.read_text()
    assert "import torch" not in source
    assert "kp_dynamo" not in source
    assert worker_process.python_for("v5e") == sys.executable


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, None),
        ({"timeout_s": 60}, 60),
        ({"options": {"compile_timeout_s": 90}}, 90),
        ({"options": {"compile_timeout_s": 90}, "timeout_s": 60}, 60),
        ({"options": {"compile_timeout_s": None}}, None),
    ],
)
def test_the_compiler_s_limit_is_the_argument_s_or_the_option_s(monkeypatch, given, seconds):
    class Started(Exception):
        pass

    def start(target, deadline, *_):
        raise Started(deadline)

    monkeypatch.setattr("kp_dynamo.aot.compiling.TpuCompiler", start)
    with pytest.raises(Started) as started:
        kp_dynamo.aot_compile(nn.Linear(8, 8), ROW, **given)
    (deadline,) = started.value.args
    assert (deadline is None) == (seconds is None)
    assert deadline is None or seconds - 30 < deadline - time.monotonic() <= seconds
