"""`XLACompiler`, and the one function that compiles a model of the object API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from kp_dynamo.api.environment import checked_config, of_type, start_device, xla_problem
from kp_dynamo.api.inference_module import InferenceModule
from kp_dynamo.api.models import SampleInputs, checked_model, device_of, run_once
from kp_dynamo.cache import LRUCache
from kp_dynamo.compat import chips
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.config.tpu_config import HardwareConfig, KernelPyTorchConfig, TPUConfig
from kp_dynamo.config.translation import compile_arguments
from kp_dynamo.exceptions import (
    TPUBackendError,
    TPUCacheError,
    TPUConfigurationError,
    TPUDeviceError,
    XLACompilationError,
)
from kp_dynamo.explanation.run_once import dynamo_seconds, fresh_dynamo

_MAX_MODELS = 1 << 20

HINTS: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()
"""Arguments of `torch.compile` for one model that win over the configuration; `XLAOptimizations` sets them."""


class XLACompiler:
    """Compiles models; the session keeps up to `cache_max_size` of them, the least recently used are evicted first.

    A model is not moved: the backend copies a CPU model to the device at every call. The configuration is read at every
    call, so changes take effect.
    """

    def __init__(self, tpu_config: TPUConfig) -> None:
        self._whole = KernelPyTorchConfig(hardware=HardwareConfig(tpu=checked_config(tpu_config)))
        self._num_compiled = 0

    @classmethod
    def following(cls, config: KernelPyTorchConfig) -> XLACompiler:
        """A compiler by `config.hardware.tpu` as it is at each call, also if that was replaced."""
        compiler = cls(config.hardware.tpu)
        compiler.follow(config)
        return compiler

    def follow(self, config: KernelPyTorchConfig) -> None:
        """Compile by `config.hardware.tpu` from now on."""
        checked_config(config.hardware.tpu)
        self._whole = config

    @property
    def config(self) -> TPUConfig:
        """The configuration."""
        return self._whole.hardware.tpu

    @config.setter
    def config(self, value: TPUConfig) -> None:
        self._whole.hardware.tpu = checked_config(value)

    def compile_model(
        self, model: nn.Module, sample_inputs: Any = None, use_cache: bool = True, *, level: str | None = None
    ) -> nn.Module:
        """Compile `model` in its current mode, including the backward if it requires gradients.

        Args:
            model: It is unchanged, and shares its parameters with the result.
            sample_inputs: Its inputs: a tensor, a tuple of arguments or a dict of keyword arguments. With sample
                inputs, one call compiles the programs now; without, the first call compiles them.
            use_cache: Whether to reuse an equal compilation of this compiler.
            level: "conservative", "balanced" or "aggressive"; None: that of a hint, else of the configuration.

        Raises:
            TPUModelPreparationError: It is not a module.
            TPUCacheError: `use_cache` is not a bool.
            XLACompilationError: It cannot be compiled; XLACompilationTimeoutError if compiling took too long.
            TPUBackendError: Any other failure, as one of its subclasses.
        """
        return self._compiled(checked_model(model), sample_inputs, use_cache, level)

    def optimize_for_inference(
        self, model: nn.Module, sample_inputs: Any = None, use_cache: bool = True, *, level: str | None = None
    ) -> nn.Module:
        """Put `model` in eval mode and compile it without gradients."""
        return self._compiled(checked_model(model).eval(), sample_inputs, use_cache, level, has_grad=False)

    def optimize_for_training(
        self, model: nn.Module, sample_inputs: Any = None, use_cache: bool = True, *, level: str | None = None
    ) -> nn.Module:
        """Put `model` in training mode and compile it."""
        return self._compiled(checked_model(model).train(), sample_inputs, use_cache, level)

    def get_compilation_stats(self) -> dict[str, Any]:
        """This compiler's models and counts; `kp_dynamo.cache_stats` has those of the programs of the process."""
        return {
            "compilation_cache": {k: v for k, v in self._models().get_stats().items() if k != "max_size"},
            "cache_max_size": self.config.cache_max_size,
            "total_compiled_models": self._num_compiled,
            "xla_available": not xla_problem(),
            "compilation_mode": self.config.compilation_mode.value,
        }

    def benchmark_compilation(self, model: nn.Module, sample_inputs: Any, num_runs: int = 3) -> dict[str, float]:
        """Seconds of a cold compilation and first call of `model`: "min_time", "avg_time" and "max_time".

        No cache is used, and Dynamo is reset. `XLAUtilities.profile_xla_compilation` has the time by stage.
        """
        if not isinstance(num_runs, int) or num_runs < 1:
            raise TPUConfigurationError(f"num_runs={num_runs!r} is invalid. Allowed: an int >= 1.")
        runs = [time_compilation(model, sample_inputs, self.config)["total"] for _ in range(num_runs)]
        return {"min_time": min(runs), "avg_time": sum(runs) / num_runs, "max_time": max(runs)}

    def clear_cache(self) -> None:
        """Drop the models of this compiler. Programs stay cached: `kp_dynamo.clear_cache()` drops those too."""
        self._models().clear()

    def _models(self) -> LRUCache[object, tuple[nn.Module, nn.Module]]:
        from kp_dynamo.session import SESSION

        return SESSION.models_of(self, self.config.cache_max_size)

    def _compiled(
        self, module: nn.Module, sample_inputs: Any, use_cache: bool, level: str | None, has_grad: bool = True
    ) -> nn.Module:
        allowed = "True, False. Try: sample_inputs=(x, y), for a model of several inputs"
        of_type(bool, "use_cache", use_cache, TPUCacheError, allowed)
        arguments = arguments_for(module, self.config, level)
        inputs = None if sample_inputs is None else SampleInputs.of(sample_inputs).on_device_of(module)
        key = (id(module), module.training, has_grad, repr(arguments), inputs and inputs.signature())
        found = self._models().get(key) if use_cache else None
        if found is not None:
            return found[1]
        with torch.set_grad_enabled(has_grad and torch.is_grad_enabled()):
            compiled = _compile(module, arguments, inputs)
        if not has_grad:
            compiled = InferenceModule.of(compiled)
        self._num_compiled += 1
        if use_cache:
            # Keep the module alive too, so that its id stays unique.
            self._models().set(key, (module, compiled))
        return compiled


def arguments_for(module: nn.Module, config: TPUConfig, level: str | None = None) -> dict[str, Any]:
    """Start the device, and return the arguments of `torch.compile` by the configuration and the model's hints."""
    start_device(config)
    arguments, hints = compile_arguments(config, level, chips.chip_name()), HINTS.get(module, {})
    chosen = {} if level is None else {"level": level}
    return {**arguments, **hints, "options": {**arguments["options"], **hints.get("options", {}), **chosen}}


def _compile(module: nn.Module, arguments: dict[str, Any], inputs: SampleInputs | None) -> nn.Module:
    """Compile a model, now if there are inputs: what TPUBackend, TPUOptimizer and XLACompiler come to."""
    if device_of(module).type == "meta":
        raise TPUDeviceError(
            "the model is on the meta device and has no values. Allowed: the CPU, the XLA device. Try: "
            "model.to_empty(device=...) and load the values, or kp_dynamo.aot_compile, which needs none."
        )
    from kp_dynamo.session import compile_module

    compiled = compile_module(module, arguments, CompileOptions.from_dict(arguments["options"]))
    if inputs is not None:
        # Models of one class share their code. By default Dynamo compiles 8 of them and runs the others eagerly.
        many = torch._dynamo.config.patch(recompile_limit=_MAX_MODELS, accumulated_recompile_limit=_MAX_MODELS)
        with readable_errors(), many:
            run_once(module, compiled, inputs)
    return compiled


def time_compilation(model: nn.Module, sample_inputs: Any, config: TPUConfig) -> dict[str, float]:
    """Seconds by stage of a compilation with empty caches, torch_xla's too; see `profile_xla_compilation`.

    The model is called once, with its backward, and left unchanged.
    """
    module = checked_model(model)
    arguments, inputs = arguments_for(module, config), SampleInputs.of(sample_inputs).on_device_of(module)
    # These imports need torch_xla.
    from kp_dynamo.explanation.recorder import Recorder
    from kp_dynamo.session import Session, compile_module

    options, recorder = CompileOptions.from_dict(arguments.pop("options")), Recorder((), ())
    session = Session(options.cache_size, observe=recorder, salt=f"timed {time.monotonic_ns()} ")
    arguments["backend"] = session.as_backend(options)
    with readable_errors(), fresh_dynamo():
        before, start = dynamo_seconds(), time.perf_counter()
        run_once(module, compile_module(module, arguments, options), inputs)
        total = time.perf_counter() - start
        stages = {"dynamo": dynamo_seconds() - before, **recorder.seconds()}
    return {**stages, "run": max(0.0, total - sum(stages.values())), "total": total}


@contextmanager
def readable_errors() -> Iterator[None]:
    """Unwrap our exceptions from torch's, and translate Dynamo's exceptions to ours."""
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as wrapped:
        if isinstance(wrapped.inner_exception, TPUBackendError):
            raise wrapped.inner_exception from wrapped
        raise XLACompilationError(f"the model could not be compiled: {wrapped}") from wrapped
    except torch._dynamo.exc.TorchDynamoException as problem:
        raise XLACompilationError(
            f"the model could not be captured: {problem}. With compilation_mode XLA it must be one graph; TORCH_XLA "
            "allows several. Sample inputs must be valid inputs of the model."
        ) from problem
    except RuntimeError as problem:
        if "double backward" not in str(problem):
            raise
        raise XLACompilationError(
            "the forward of the model differentiates with create_graph=True, and the backward of that gradient cannot "
            "be compiled. Allowed: a model that autograd differentiates once. Try: torch.func.grad in the forward; "
            "without training, create_graph=False."
        ) from problem
