"""`XLACompiler`: programs by counter, the cache of models, each field of the configuration that reaches a program."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from kp_dynamo import (
    TPUCacheError,
    TPUConfig,
    TPUConfigurationError,
    TPUDeviceError,
    TPUModelPreparationError,
    TPUNotAvailableError,
    TPUOptimizationError,
    TPUOutOfMemoryError,
    XLACompilationError,
    XLACompilationTimeoutError,
    XLACompiler,
    cache_stats,
    clear_cache,
)
from kp_dynamo.compat import xla
from tests.spine import counted

X = torch.randn(8, 16)


@pytest.fixture(autouse=True)
def _no_programs_of_other_tests():
    clear_cache()
    yield
    clear_cache()


def compiler(**fields):
    return XLACompiler(TPUConfig(**fields))


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * 2
        return x * 3


def test_compiling_makes_programs_and_the_second_call_is_a_hit():
    kernel, model = compiler(precision="float32"), mlp()
    with counted() as counts:
        compiled = kernel.compile_model(model, X)
    assert (counts.programs, counts.graphs) == (2, 2), "forward and backward"
    with counted() as counts:
        assert kernel.compile_model(model, X) is compiled
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-5, atol=1e-6)
    assert counts.programs == counts.graphs == 0
    stats = kernel.get_compilation_stats()
    assert stats["compilation_cache"] == {"size": 1, "hits": 1, "misses": 1, "hit_rate": 0.5, "evictions": 0}
    assert (stats["total_compiled_models"], stats["xla_available"]) == (1, True)
    assert (stats["compilation_mode"], stats["cache_max_size"]) == ("torch_xla", 100)


def test_without_sample_inputs_the_first_call_compiles():
    model = mlp()
    with counted() as counts:
        compiled = compiler().compile_model(model)
    assert counts.programs == 0
    with counted() as counts, torch.no_grad():
        compiled(X)
    assert counts.programs == 1


def test_without_the_cache_nothing_is_looked_up_or_kept():
    kernel, model = compiler(), mlp()
    first = kernel.compile_model(model, use_cache=False)
    assert kernel.compile_model(model, use_cache=False) is not first
    stats = kernel.get_compilation_stats()
    assert (stats["compilation_cache"]["size"], stats["compilation_cache"]["misses"]) == (0, 0)
    assert stats["total_compiled_models"] == 2


def test_equal_models_are_two_entries_and_one_program():
    kernel = compiler()
    with torch.no_grad():
        kernel.compile_model(mlp(), X)
        with counted() as counts:
            kernel.compile_model(mlp(), X)
    assert counts.programs == 0
    assert kernel.get_compilation_stats()["compilation_cache"]["size"] == 2


def test_the_mode_of_the_model_and_the_level_are_in_the_key():
    kernel, model = compiler(), mlp()
    kinds = {kernel.compile_model(model), kernel.compile_model(model, level="conservative")}
    kinds.add(kernel.compile_model(model.eval()))
    assert len(kinds) == 3


def test_a_full_cache_lets_the_oldest_go():
    kernel, models = compiler(cache_max_size=2), [mlp() for _ in range(3)]
    first = kernel.compile_model(models[0])
    for model in models[1:]:
        kernel.compile_model(model)
    assert kernel.get_compilation_stats()["compilation_cache"]["evictions"] == 1
    assert kernel.compile_model(models[0]) is not first
    kernel.config.cache_max_size = 1
    kernel.compile_model(models[0])
    assert kernel.get_compilation_stats()["compilation_cache"]["size"] == 1


def test_clear_cache_forgets_models():
    kernel, model = compiler(), mlp()
    first = kernel.compile_model(model)
    kernel.clear_cache()
    assert kernel.get_compilation_stats()["compilation_cache"]["size"] == 0
    assert kernel.compile_model(model) is not first


def test_for_inference_there_is_no_backward_and_the_model_is_in_evaluation_mode():
    kernel, model = compiler(precision="float32"), nn.Sequential(mlp(), nn.Dropout(0.5))
    with counted() as counts:
        compiled = kernel.optimize_for_inference(model, X)
    assert (counts.programs, model.training) == (1, False)
    result = compiled(X)
    assert not result.requires_grad
    torch.testing.assert_close(result, model(X).detach(), rtol=1e-5, atol=1e-6)


def test_for_inference_copies_and_other_compilations_record_no_gradients_either():
    model = nn.Linear(16, 4)
    compiled = compiler().optimize_for_inference(model)
    for run in (compiled, lambda x: compiled(x), lambda x: compiled.forward(x)):
        assert not torch.compile(run, backend="eager", fullgraph=True)(X).requires_grad
    for copied in (copy.deepcopy(compiled), copy.deepcopy(copy.deepcopy(compiled))):
        assert not copied(X).requires_grad
    assert model(X).requires_grad


def test_for_training_gradients_are_those_of_eager():
    kernel, model = compiler(precision="float32"), mlp().eval()
    compiled = kernel.optimize_for_training(model, X)
    assert model.training
    expected = torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(compiled(X).square().sum(), list(model.parameters()))
    for mine, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-5)


def test_compiling_leaves_the_model_and_the_random_state_as_they_were():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = torch.get_rng_state()
    compiler().compile_model(model, X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_tensor_that_the_model_assigns_is_given_back():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            self.steps = self.steps + 1
            return x * self.scale * self.steps

    model = Counting()
    steps, compiled = model.steps, compiler().compile_model(model, X)
    assert model.steps is steps
    assert steps.item() == 0
    torch.testing.assert_close(compiled(X), X)


def test_buffers_that_take_no_writes_are_left():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.register_buffer("scale", torch.ones(16))
            self.register_buffer("shift", torch.zeros(1).expand(16))
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x):
            return self.norm(x) * self.scale + self.shift

    model = Frozen()
    with torch.no_grad():
        compiler().compile_model(model, X)
    assert model.norm.num_batches_tracked.item() == 0
    assert not model.norm.running_mean.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_second_derivative_by_autograd_is_our_error():
    class Force(nn.Linear):
        def forward(self, x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)[0]

    with pytest.raises(XLACompilationError, match=r"create_graph=True.*Try: torch\.func\.grad"):
        compiler().compile_model(Force(16, 4), X)


def test_a_model_without_values_is_refused():
    with pytest.raises(TPUDeviceError, match="meta device and has no values"):
        compiler().compile_model(nn.Linear(4, 4, device="meta"))


def test_a_parameter_that_the_model_writes_to_is_named(caplog):
    class Teacher(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

        def forward(self, x):
            self.mean.mul_(0.5).add_(x.mean(0))
            return x - self.mean

    compiler().compile_model(Teacher(), X)
    assert "its forward writes to mean in place" in caplog.text


@pytest.mark.parametrize(
    "inputs", [X, (X,), [X], {"input": X}, torch.randn(8, 16)[:, :16]], ids=["tensor", "tuple", "list", "dict", "view"]
)
def test_forms_of_sample_inputs(inputs):
    model = nn.Linear(16, 4)
    with counted() as counts, torch.no_grad():
        compiler().compile_model(model, inputs)
    assert counts.programs == 1


def test_sample_inputs_go_where_the_model_is():
    model = nn.Linear(16, 4).to("xla")
    with torch.no_grad():
        compiled = compiler().compile_model(model, X)
        assert compiled(X.to("xla")).device.type == "xla"


def casts(**fields):
    """Precision of the products that a configuration leads to, as the error of one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)
    with torch.no_grad():
        return (compiler(**fields).compile_model(model, x)(x) - model(x)).abs().max().item()


def test_precision_decides_about_casts():
    assert casts() > 1e-4
    assert casts(precision="float32") < 1e-5
    assert casts(mixed_precision=False) < 1e-5


def test_one_graph_of_the_whole_model_or_several():
    x = torch.ones(2)
    with torch.no_grad():
        assert compiler().compile_model(Branches(), x)(x).tolist() == [2, 2]
        with pytest.raises(XLACompilationError, match="must be one graph; TORCH_XLA allows several"):
            compiler(compilation_mode="xla").compile_model(Branches(), x)


def test_pjit_is_a_clear_error():
    with pytest.raises(TPUConfigurationError, match="cannot compile a torch model through JAX's pjit"):
        compiler(compilation_mode="pjit").compile_model(mlp())


@pytest.mark.parametrize(("is_dynamic", "captures"), [(True, 2), (False, 3)])
def test_lengths_that_change_are_captured_once_more_or_each(is_dynamic, captures):
    # Importing torch_xla itself, as other tests do, turns this off for the whole process.
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        compiled = compiler(enable_xla_dynamic_shapes=is_dynamic).compile_model(nn.Softmax(dim=-1))
        with counted() as counts:
            for length in (5, 6, 7):
                compiled(torch.randn(length, 16))
    assert counts.aot_traces == captures


def test_cache_max_size_bounds_the_programs_of_the_process():
    try:
        with torch.no_grad():
            compiler(cache_max_size=3).compile_model(mlp(), X)
        assert cache_stats()["max_size"] == 3
    finally:
        with torch.no_grad():
            compiler().compile_model(mlp(), X)
    assert cache_stats()["max_size"] == 100


def test_what_the_memory_of_the_named_chip_cannot_hold_is_refused():
    tiny = compiler(version="v6e", v6e_memory_gb=0.0001)
    with pytest.raises(TPUOutOfMemoryError, match="takes at least"), torch.no_grad():
        tiny.compile_model(nn.Linear(256, 256), torch.randn(8, 256))
    with torch.no_grad():
        compiler(version="v6e").compile_model(nn.Linear(256, 256), torch.randn(8, 256))


def test_strict_refuses_operators_on_the_cpu():
    class Eigenvalues(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvals(x).real

    with torch.no_grad(), pytest.raises(XLACompilationError, match="strict=True and XLA has no lowering"):
        compiler(enable_strict_validation=True).compile_model(Eigenvalues(), torch.eye(3))


def test_a_budget_that_is_over_is_our_error():
    with pytest.raises(XLACompilationTimeoutError, match="longer than compile_timeout_s=1e-05 allows"), torch.no_grad():
        compiler(compilation_timeout_seconds=1e-5).compile_model(mlp(), X)


def test_a_level_that_there_is_not_is_refused():
    with pytest.raises(TPUConfigurationError, match="option level='fast'"), torch.no_grad():
        compiler().compile_model(mlp(), X, level="fast")


def test_a_second_input_in_the_place_of_use_cache_is_refused():
    with pytest.raises(TPUCacheError, match=r"use_cache of type Tensor.*Try: sample_inputs=\(x, y\)"):
        compiler().compile_model(mlp(), X, torch.ones(2))


def test_models_go_with_their_compiler_and_with_the_session():
    kernel, other, model = compiler(), compiler(), mlp()
    compiled = kernel.compile_model(model)
    assert other.compile_model(model) is not compiled
    clear_cache()
    assert kernel.get_compilation_stats()["compilation_cache"]["size"] == 0
    kernel.compile_model(model)
    gone = weakref.ref(model)
    del kernel, other, model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("model", [None, "model", print])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(TPUModelPreparationError, match=r"Allowed: a torch\.nn\.Module"):
        compiler().compile_model(model)


def test_sample_inputs_that_do_not_fit_are_refused():
    with pytest.raises(XLACompilationError, match=r"(?s)could not be captured.*Sample inputs must be"):
        compiler().compile_model(mlp(), torch.randn(8, 3))


def test_a_failing_compilation_is_ours_and_nothing_is_kept(monkeypatch):
    from kp_dynamo.lowering.openxla import OpenXla

    def fail(*_):
        raise RuntimeError("XLA said no")

    kernel, model = compiler(), mlp()
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(OpenXla, "compile", fail)
            with pytest.raises(XLACompilationError, match="XLA said no"):
                kernel.compile_model(model, X)
        assert kernel.get_compilation_stats()["compilation_cache"]["size"] == 0
        assert kernel.compile_model(model, X)(X).shape == (8, 4)


def test_a_failing_pass_is_named(monkeypatch):
    from kp_dynamo.passes.cast_bf16 import CastBf16

    def fail(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(CastBf16, "__call__", fail)
    with pytest.raises(TPUOptimizationError, match="pass 'cast_bf16' failed"), torch.no_grad():
        compiler().compile_model(mlp(), X)


def test_a_disabled_tpu_compiles_nothing():
    with pytest.raises(TPUNotAvailableError, match="enabled=False"):
        compiler(enabled=False).compile_model(mlp())


def test_a_whole_configuration_is_not_one_of_a_tpu():
    with pytest.raises(TPUConfigurationError, match=r"Try: config\.hardware\.tpu"):
        XLACompiler(None)


def test_compilation_is_benchmarked_from_nothing_each_time():
    before = xla.xlac()._xla_counter_value("UncachedCompile")
    with torch.no_grad():
        found = compiler().benchmark_compilation(nn.Linear(16, 4), X, num_runs=3)
    assert xla.xlac()._xla_counter_value("UncachedCompile") - before == 3
    assert 0 < found["min_time"] <= found["avg_time"] <= found["max_time"]
    assert cache_stats()["size"] == 0


@pytest.mark.parametrize("num_runs", [0, -1, 1.5, None])
def test_a_number_of_runs_that_is_none(num_runs):
    with pytest.raises(TPUConfigurationError, match="num_runs="):
        compiler().benchmark_compilation(mlp(), X, num_runs=num_runs)


def test_every_model_of_a_class_is_compiled():
    compiler = XLACompiler(TPUConfig())
    for width in range(8, 8 + 2 * torch._dynamo.config.recompile_limit):
        model = nn.Linear(16, width)
        with counted() as compiling:
            compiled = compiler.optimize_for_inference(model, X)
        assert compiling["programs"] == 1, width
        with counted() as calling:
            assert torch.allclose(compiled(X), model(X), atol=1e-1)
        assert calling["programs"] == 0
