"""`XLACompiler`: compiles models through `torch.compile(backend="kp_tpu")` and caches them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kp_dynamo.api.environment import checked_config, start_device
from kp_dynamo.api.hints import with_hints
from kp_dynamo.api.models import SampleInputs, checked_model, device_of, unchanged
from kp_dynamo.backend import cache_stats
from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import check_versions
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.config.translation import compile_arguments
from kp_dynamo.exceptions import TPUBackendError, TPUConfigurationError, TPUDeviceError, XLACompilationError
from kp_dynamo.explanation.run_once import run_backward
from kp_dynamo.telemetry.counters import TELEMETRY

_MAX_MODELS = 1 << 20


class XLACompiler:
    """Compiles models and caches up to `cache_max_size` of them; the least recently used are evicted first.

    A model is not moved: the backend copies a CPU model to the device at every call.

    Args:
        tpu_config: It is read at every call, so changes take effect.

    Raises:
        TPUConfigurationError: It is not a TPUConfig.
    """

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        self._models: LRUCache[object, tuple[nn.Module, nn.Module]] = LRUCache(self.config.cache_max_size)
        self._num_compiled = 0
        self._seconds = 0.0

    def compile_model(
        self, model: nn.Module, sample_inputs: Any = None, use_cache: bool = True, *, level: str | None = None
    ) -> nn.Module:
        """Compile `model` in its current mode, including the backward if it requires gradients.

        Args:
            model: It is unchanged, and shares its parameters with the result.
            sample_inputs: Its inputs: a tensor, a tuple of arguments or a dict of keyword arguments. With sample
                inputs, one call compiles the programs now; without, the first call compiles them.
            use_cache: Whether to reuse an equal compilation.
            level: "conservative", "balanced" or "aggressive"; None: that of a hint, else of
                the configuration.

        Raises:
            TPUModelPreparationError: It is not a module.
            XLACompilationError: It cannot be compiled; XLACompilationTimeoutError if compiling took too long.
            TPUBackendError: Any other failure, as one of its subclasses.
        """
        return self._compiled(checked_model(model), sample_inputs, use_cache, level, is_inference=False)

    def optimize_for_inference(
        self, model: nn.Module, sample_inputs: Any = None, use_cache: bool = True, *, level: str | None = None
    ) -> nn.Module:
        """Put `model` in eval mode and compile it without gradients."""
        return self._compiled(checked_model(model).eval(), sample_inputs, use_cache, level, is_inference=True)

    def optimize_for_training(
        self, model: nn.Module, sample_inputs: Any = None, use_cache: bool = True, *, level: str | None = None
    ) -> nn.Module:
        """Put `model` in training mode and compile it."""
        return self._compiled(checked_model(model).train(), sample_inputs, use_cache, level, is_inference=False)

    def get_compilation_stats(self) -> dict[str, Any]:
        """This compiler's model cache and counts, and the programs and program cache of the process."""
        return {
            "compilation_cache": {k: v for k, v in self._models.get_stats().items() if k != "max_size"},
            "cache_max_size": self.config.cache_max_size,
            "total_compiled_models": self._num_compiled,
            "total_compilation_time": self._seconds,
            "xla_available": _is_xla_available(),
            "compilation_mode": self.config.compilation_mode.value,
            "programs_compiled": TELEMETRY.counts["programs"],
            "program_cache": cache_stats(),
        }

    def benchmark_compilation(self, model: nn.Module, sample_inputs: Any, num_runs: int = 3) -> dict[str, Any]:
        """Seconds of a cold compilation of `model`, including XLA; no cache is used.

        Dynamo is reset: functions compiled earlier are captured again when called.

        Returns:
            "min_time", "avg_time" and "max_time" of the first call, and "stages": the average by stage.
        """
        from kp_dynamo.api.compile_timing import time_compilation

        if not isinstance(num_runs, int) or num_runs < 1:
            raise TPUConfigurationError(f"num_runs={num_runs!r} is invalid. Allowed: an int >= 1.")
        module, arguments = checked_model(model), self._arguments(checked_model(model), None)
        with readable_errors():
            runs = [
                time_compilation(module, _inputs_on_device(module, sample_inputs), arguments) for _ in range(num_runs)
            ]
        totals = [run["total"] for run in runs]
        stages = {name: sum(run[name] for run in runs) / num_runs for name in runs[0] if name != "total"}
        return {
            "min_time": min(totals), "avg_time": sum(totals) / num_runs, "max_time": max(totals),
            "num_runs": num_runs, "stages": stages,
        }  # fmt: skip

    def clear_cache(self) -> None:
        """Drop the compiled models of this compiler. Programs stay cached: `kp_dynamo.clear_cache()` drops those."""
        self._models.clear()

    def _arguments(self, module: nn.Module, level: str | None) -> dict[str, Any]:
        start_device(self.config)
        return with_hints(module, compile_arguments(self.config, level, xla.chip_name()), level)

    def _compiled(
        self, module: nn.Module, sample_inputs: Any, use_cache: bool, level: str | None, is_inference: bool
    ) -> nn.Module:
        _require_values(module)
        arguments = self._arguments(module, level)
        inputs = None if sample_inputs is None else _inputs_on_device(module, sample_inputs)
        self._models.resize(self.config.cache_max_size)
        key = (id(module), module.training, is_inference, repr(arguments), inputs and inputs.signature())
        found = self._models.get(key) if use_cache else None
        if found is not None:
            return found[1]
        start = time.perf_counter()
        if arguments["fullgraph"]:
            # Otherwise Dynamo would reuse the graph breaks of an earlier compilation of this code.
            torch._dynamo.reset()
        compiled: nn.Module = torch.compile(module, **arguments)  # type: ignore[assignment]  # a module for a module
        if is_inference:
            compiled.forward = torch.no_grad()(compiled.forward)
        if inputs is not None:
            _call_once(module, compiled, inputs)
        self._num_compiled += 1
        self._seconds += time.perf_counter() - start
        if use_cache:
            # Keep the module alive too, so that its id stays unique.
            self._models.set(key, (module, compiled))
        return compiled


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


def _call_once(module: nn.Module, compiled: nn.Module, inputs: SampleInputs) -> None:
    """Compile every program that a call with these inputs needs; the model is unchanged."""
    # Models of one class share their code. By default Dynamo compiles 8 of them and runs the others eagerly.
    many = torch._dynamo.config.patch(recompile_limit=_MAX_MODELS, accumulated_recompile_limit=_MAX_MODELS)
    with readable_errors(), unchanged(module), many:
        results = inputs.call(compiled)
        if torch.is_grad_enabled():
            run_backward(results)


def _require_values(module: nn.Module) -> None:
    if device_of(module).type == "meta":
        raise TPUDeviceError(
            "the model is on the meta device and has no values. Allowed: the CPU, the XLA device. Try: "
            "model.to_empty(device=...) and load the values, or kp_dynamo.aot_compile, which needs none."
        )


def _inputs_on_device(module: nn.Module, sample_inputs: Any) -> SampleInputs:
    return SampleInputs.of(sample_inputs).on(device_of(module))


def _is_xla_available() -> bool:
    try:
        check_versions()
    except TPUBackendError:
        return False
    return True
