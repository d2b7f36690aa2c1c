"""`torch.compile(model, backend="kp_tpu", options={...})`: the way of a graph, top to bottom."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from kp_dynamo.compat import thread_state, xla
from kp_dynamo.compat.versions import earlier_version
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.error_boundary import translate_errors
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.telemetry import log

if TYPE_CHECKING:
    from kp_dynamo.session import Session


def kp_tpu(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None) -> Any:
    """Compile a graph that Dynamo captured for the XLA device. Registered as a `torch.compile` backend.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its inputs: all on the CPU (then the backend places them) or all on the XLA device.
        options: See `CompileOptions`.
        mode: Only None or "default".

    Returns:
        A callable that takes and returns what `gm` does.

    Raises:
        TPUBackendError: Whatever stands in the way, as one of its subclasses; torch wraps it in
            `BackendCompilerFailed`, where it is `.inner_exception`.
    """
    if mode not in (None, "default"):
        raise TPUConfigurationError(
            f"mode={mode!r} is one of inductor's. Allowed: mode='default'. Choose options={{'level': ...}} instead."
        )
    chosen = CompileOptions.from_dict(options)
    xla.device()
    if (version := earlier_version()) is not None:
        from kp_dynamo.legacy_backend import compile_with_stock

        log.configure()
        return compile_with_stock(gm, example_inputs, chosen, version)
    # What needs torch_xla is imported once it is known to be there and to fit.
    from kp_dynamo.session import SESSION

    if "cache_size" in chosen.given:
        SESSION.resize(chosen.cache_size)
    return compile_in(SESSION, gm, example_inputs, chosen)


def compile_in(session: Session, gm: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions) -> Any:
    """What `kp_tpu` returns, compiled with the caches of `session`; the device has been started."""
    from kp_dynamo.capture.capture import read_capture

    log.configure()
    with translate_errors(gm, breaks_graphs=session.may_run_eagerly(options)):
        options = options.on(xla.chip_name())
        by_module = bool(options.keep_float32 or options.extra_passes)
        compiled = session.compiled(read_capture(gm, example_inputs, with_modules=by_module), options)
    return torch._dynamo.disable(compiled, reason="a compiled graph")


def cache_stats() -> dict[str, Any]:
    """Statistics of the compile cache: `size, max_size, hits, misses, hit_rate, evictions` of programs.

    Under "captures" the same of whole captures, which are found before AOTAutograd.
    """
    from kp_dynamo.session import SESSION

    return {**SESSION.runtime.cache.get_stats(), "captures": dict(SESSION.captures.get_stats())}


def clear_cache() -> None:
    """Forget every compiled program and every copy on the device. Compiled functions in use compile again."""
    from kp_dynamo.session import SESSION

    SESSION.clear()


thread_state.install()
# Dynamo traces before it calls a backend: XLA tensors with symbolic sizes must be traceable by then.
if "torch_xla" in sys.modules:
    xla.patch_torch_xla()
