"""Validation: what is found in a configuration, in a model and in a run of it; strict mode."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from kp_dynamo import (
    KernelPyTorchConfig,
    TPUConfig,
    TPUConfigurationError,
    TPUModelPreparationError,
    TPUValidationError,
    validate_tpu_configuration,
    validate_tpu_model,
)
from tests.spine import counted

FITTING = nn.Linear(128, 256)
X = torch.randn(8, 128)


def found(summary):
    return {r.name: r.status for r in summary.reports if r.status != "passed"}


@pytest.mark.parametrize("mode", [None, "inference", "training", "development"])
def test_the_presets_are_fine(mode):
    summary = validate_tpu_configuration(KernelPyTorchConfig(mode))
    assert found(summary) == {}
    assert (summary.failed, summary.warnings, summary.success_rate) == (0, 0, 1.0)
    assert summary.total_tests == summary.passed == len(summary.reports) > 5


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enabled": False}, {"enabled": "failed"}),
        ({"compilation_mode": "pjit"}, {"compilation_mode": "failed"}),
        ({"topology": "superpod"}, {"topology": "failed"}),
        ({"xla_flags": "--xla_late"}, {"xla_flags": "failed"}),
        ({"precision": "float32"}, {"mixed_precision": "warning"}),
        ({"precision": "float32", "mixed_precision": False}, {}),
        ({"cache_max_size": 1}, {"cache_max_size": "warning"}),
        ({"memory_fraction": 1.0}, {"memory_fraction": "warning"}),
        ({"v6e_memory_gb": 16}, {"v6e_memory_gb": "warning"}),
        ({"v6e_memory_gb": 16, "version": "v6e"}, {}),
        ({"v7_memory_gb": 300, "version": "v7"}, {"v7_memory_gb": "warning"}),
    ],
)
def test_what_is_found_in_a_configuration(fields, expected):
    assert found(validate_tpu_configuration(TPUConfig(**fields))) == expected
    if expected:
        with pytest.raises(TPUValidationError, match=next(iter(expected))):
            validate_tpu_configuration(TPUConfig(**fields, enable_strict_validation=True))


@pytest.mark.parametrize("config", [None, {}, "v5e"])
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises(TPUConfigurationError, match=r"Try: config\.hardware\.tpu"):
        validate_tpu_configuration(config)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (FITTING, {}),
        (nn.Linear(128, 10), {"tiles model": "warning"}),
        (nn.Sequential(FITTING, nn.Linear(256, 100)), {"tiles 1": "warning"}),
        (nn.Conv2d(3, 128, 3), {"tiles model": "warning"}),
        (nn.Conv2d(128, 128, 3), {}),
        (nn.Linear(128, 128).half(), {"dtype torch.float16": "warning"}),
        (nn.Linear(128, 128).double(), {"dtype torch.float64": "warning"}),
        (nn.Linear(128, 128).bfloat16(), {}),
        (nn.ReLU(), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_found_in_a_model(model, expected):
    assert found(validate_tpu_model(model, TPUConfig())) == expected


def test_the_tiles_are_those_of_the_chip():
    assert found(validate_tpu_model(nn.Linear(128, 128), TPUConfig(version="v6e"))) == {"tiles model": "warning"}
    (tile,) = [r for r in validate_tpu_model(nn.Linear(128, 100), TPUConfig()).reports if r.status == "warning"]
    assert tile.message == "out_features 100: no multiple of 128; a v5e computes 1.28 times as much as requested"


@pytest.mark.parametrize(("version", "status"), [("v6e", "failed"), ("auto", "warning")])
def test_a_model_without_room(version, status, monkeypatch):
    monkeypatch.setattr("kp_dynamo.api.validation.memory_budget_bytes", lambda *_: 1e5)
    summary = validate_tpu_model(nn.Linear(256, 256), TPUConfig(version=version))
    assert found(summary) == {"memory": status}


def test_the_room_is_that_of_a_device():
    (memory,) = [r for r in validate_tpu_model(FITTING, TPUConfig(version="v7")).reports if r.name == "memory"]
    assert memory.message.endswith(f"of the {96 * 2**30 * 0.9 / 1e9:.2f} GB available on half a v7")


@pytest.mark.parametrize("is_started", [True, False])
def test_auto_is_the_chip_of_the_machine(is_started, monkeypatch):
    monkeypatch.setattr("kp_dynamo.compat.chips.chip_name", lambda: "v6e")
    monkeypatch.setattr("kp_dynamo.compat.xla.is_started", lambda: is_started)
    config = TPUConfig(v6e_memory_gb=16, v7_memory_gb=100)
    assert found(validate_tpu_configuration(config)) == ({"v7_memory_gb": "warning"} if is_started else {})


def test_a_model_in_pieces_on_two_devices():
    model = nn.ModuleList([nn.Linear(128, 128), nn.Linear(128, 128, device="meta")])
    assert found(validate_tpu_model(model, TPUConfig())) == {"placement": "failed"}


def test_with_inputs_the_model_is_called_and_nothing_is_compiled():
    model = nn.Sequential(FITTING, nn.BatchNorm1d(256))
    with counted() as counts:
        summary = validate_tpu_model(model, TPUConfig(), {"input": X})
    assert (found(summary), counts.programs, model[1].num_batches_tracked.item()) == ({}, 0, 0)
    assert summary.reports[-1].name == "inputs"


class Force(nn.Module):
    """The derivative of an energy, as potentials of molecules compute it."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]


def test_a_model_may_differentiate_unless_its_caller_disables_gradients():
    assert found(validate_tpu_model(Force(), TPUConfig(), X)) == {}
    with torch.no_grad():
        assert found(validate_tpu_model(Force(), TPUConfig(), X)) == {"inputs": "failed"}


def test_inputs_that_do_not_fit_fail_without_a_compile():
    with counted() as counts:
        summary = validate_tpu_model(FITTING, TPUConfig(), torch.randn(8, 3))
    assert (found(summary), counts.programs) == ({"inputs": "failed"}, 0)
    assert (summary.failed, summary.success_rate) == (1, 1 - 1 / summary.total_tests)


def test_strict_raises_and_names_everything():
    model, config = nn.Linear(128, 10).double(), TPUConfig(enable_strict_validation=True)
    with pytest.raises(TPUValidationError, match=r"strict validation found 2 problem\(s\).*float64.*tiles") as raised:
        validate_tpu_model(model, config)
    assert isinstance(raised.value, ValueError)
    assert validate_tpu_model(FITTING, config).failed == 0


def test_what_is_no_model_is_refused():
    with pytest.raises(TPUModelPreparationError, match="model of type str"):
        validate_tpu_model("model", TPUConfig())


def test_a_summary_as_text_and_as_json():
    summary = validate_tpu_model(nn.Linear(128, 10), TPUConfig())
    assert "warning tiles model: out_features 10" in str(summary)
    content = json.loads(json.dumps(dataclasses.asdict(summary)))
    assert set(content) == {"total_tests", "passed", "failed", "warnings", "success_rate", "reports"}
    assert set(content["reports"][0]) == {"name", "status", "message"}
