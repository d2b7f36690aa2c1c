"""`TPUOptimizer`: levels, measured figures, what is refused."""

import pytest
import torch
from torch import nn

from kp_dynamo import (
    KernelPyTorchConfig,
    TPUConfig,
    TPUConfigurationError,
    TPUModelPreparationError,
    TPUNotAvailableError,
    TPUOptimizer,
    TPUValidationError,
    XLAOptimizations,
    clear_cache,
)
from tests.spine import counted

X = torch.randn(8, 16)


@pytest.fixture
def optimizer():
    clear_cache()
    return TPUOptimizer()


def strict():
    return TPUOptimizer(KernelPyTorchConfig("development"))


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def test_it_has_a_configuration_a_backend_and_a_compiler(optimizer):
    assert optimizer.config == KernelPyTorchConfig()
    assert optimizer.backend.compiler is optimizer.compiler
    assert optimizer.compiler.config is optimizer.config.hardware.tpu


def test_a_configuration_that_was_replaced_is_in_force(optimizer):
    compiler, optimizer.config.hardware.tpu = optimizer.compiler, TPUConfig(compilation_mode="pjit")
    assert compiler.config is optimizer.config.hardware.tpu
    for compile_model in (compiler.compile_model, optimizer.optimize, optimizer.backend.compiler.compile_model):
        with pytest.raises(TPUConfigurationError, match="pjit"):
            compile_model(mlp())


def test_a_whole_configuration_that_was_replaced_is_in_force(optimizer):
    whole = KernelPyTorchConfig()
    whole.hardware.tpu.compilation_mode = "pjit"
    with pytest.raises(TPUConfigurationError, match="config of type TPUConfig is invalid"):
        optimizer.config = TPUConfig()
    optimizer.config = whole
    assert optimizer.backend.config is optimizer.config is whole
    assert optimizer.compiler.config is whole.hardware.tpu


@pytest.mark.parametrize("level", ["conservative", "balanced", "aggressive"])
def test_every_level_compiles_and_measures(optimizer, level):
    model = mlp()
    with counted() as counts:
        result = optimizer.optimize(model, X, optimization_level=level)
    metrics = result.performance_metrics
    assert (counts.programs, metrics["num_programs"], result.optimization_level) == (2, 2, level)
    assert metrics["ms_per_call"] > 0
    assert metrics["eager_ms_per_call"] > 0
    assert result.optimization_time > metrics["compile_s"] > 0
    apart = metrics["relative_difference"]
    assert 0 < apart["results"] < 0.02
    assert 0 < apart["gradients"] < 0.02
    torch.testing.assert_close(result.optimized_model(X), model(X), rtol=2e-2, atol=2e-2)


def test_without_sample_inputs_nothing_is_measured(optimizer):
    with counted() as counts:
        result = optimizer.optimize(mlp())
    assert counts.programs == 0
    assert result.performance_metrics == {}
    assert result.optimized_model(X).shape == (8, 4)


def test_the_configuration_s_level_for_inference_and_training(optimizer):
    optimizer.config.hardware.tpu.xla_optimization_level = 1
    model = mlp()
    inference, training = optimizer.optimize_for_inference(model), None
    assert not model.training
    training = optimizer.optimize_for_training(model)
    assert model.training
    assert (inference.optimization_level, training.optimization_level) == ("balanced", "balanced")
    assert not inference.optimized_model(X).requires_grad
    assert training.optimized_model(X).requires_grad


@pytest.mark.parametrize(("number", "level"), [(0, "conservative"), (1, "balanced"), (2, "aggressive")])
def test_a_call_that_names_no_level_takes_the_configuration_s(optimizer, number, level):
    optimizer.config.hardware.tpu.xla_optimization_level = number
    assert optimizer.optimize(mlp()).optimization_level == level
    assert optimizer.optimize(mlp(), None, "balanced").optimization_level == "balanced"


def test_the_level_of_a_hint_is_behind_that_of_the_call_and_before_the_configuration_s(optimizer, monkeypatch):
    compile_, levels = torch.compile, []
    monkeypatch.setattr(
        torch, "compile", lambda model, **how: levels.append(how["options"]["level"]) or compile_(model, **how)
    )
    model = XLAOptimizations(TPUConfig()).add_compilation_hints(mlp(), level="conservative", precision="float32")
    results = [
        optimizer.optimize(model, optimization_level="balanced"),
        optimizer.optimize(model),
        optimizer.optimize_for_inference(model),
        optimizer.optimize_for_training(model),
    ]
    assert [r.optimization_level for r in results] == ["balanced"] + 3 * ["conservative"]
    assert levels == ["balanced"] + 2 * ["conservative"], "the last one is the second one, found again"
    optimizer.compiler.compile_model(model, use_cache=False)
    optimizer.compiler.compile_model(model, use_cache=False, level="aggressive")
    assert levels[3:] == ["conservative", "aggressive"]


def test_a_random_model_is_not_compared(optimizer):
    result = optimizer.optimize(nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.1)), X)
    assert result.performance_metrics["relative_difference"] == {"results": None, "gradients": None}


def test_statistics_and_clearing(optimizer):
    model = mlp()
    optimizer.optimize(model)
    optimizer.optimize(model)
    optimizer.optimize(model, optimization_level="conservative")
    stats = optimizer.get_optimization_stats()
    assert (stats["total_optimizations"], stats["by_level"]) == (3, {"aggressive": 2, "conservative": 1})
    assert stats["compilation"]["compilation_cache"]["hits"] == 1
    optimizer.clear_cache()
    assert optimizer.compiler.get_compilation_stats()["compilation_cache"]["size"] == 0


def test_an_unknown_level_is_a_value_error(optimizer):
    with pytest.raises(
        ValueError, match=r"Unknown optimization level 'fast'\. Allowed: conservative, balanced, aggress"
    ):
        optimizer.optimize(mlp(), X, optimization_level="fast")
    assert optimizer.get_optimization_stats()["total_optimizations"] == 0


def test_sample_inputs_that_do_not_fit_are_a_validation_error(optimizer):
    """Not the tiles as well, which are a warning."""
    only = r"^validation found 1 problem\(s\)\. inputs \(failed\): the model raises RuntimeError.*Try: change them\.$"
    with pytest.raises(TPUValidationError, match=only):
        optimizer.optimize(mlp(), torch.randn(8, 3))


def test_strict_makes_errors_of_warnings():
    fitting = nn.Linear(128, 128)
    with torch.no_grad():
        assert strict().optimize(fitting, torch.randn(8, 128)).validation.warnings == 0
    with pytest.raises(TPUValidationError, match=r"tiles 0 \(warning\): in_features 16, out_features 32"):
        strict().optimize(mlp(), X)


def test_what_is_no_model_is_refused(optimizer):
    with pytest.raises(TPUModelPreparationError, match="model of type NoneType"):
        optimizer.optimize(None)


def test_a_disabled_tpu():
    config = KernelPyTorchConfig()
    config.hardware.tpu = TPUConfig(enabled=False)
    with pytest.raises(TPUNotAvailableError, match="enabled=False"):
        TPUOptimizer(config)
