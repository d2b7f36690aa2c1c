"""`torch.compile(model, backend="kp_tpu", options={...})`: the path of a graph, top to bottom."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any

from torch import fx

from kp_dynamo import uncompiled_frames
from kp_dynamo.compat import (
    device_errors,
    given_up_frames,
    importing,
    logging_calls,
    padded_encoders,
    recurrent_modules,
    thread_state,
    xla,
)
from kp_dynamo.compat.versions import earlier_version
from kp_dynamo.config.modes import accept_mode
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.disk_cache.enable import disk_stats
from kp_dynamo.graph.operand_devices import problem_of_devices
from kp_dynamo.telemetry import log
from kp_dynamo.telemetry.counters import TELEMETRY


def kp_tpu(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None, mode: str | None = None) -> Any:
    """Compile a graph that Dynamo captured for the XLA device. Registered as a `torch.compile` backend.

    Args:
        gm: Dynamo's graph.
        example_inputs: The graph inputs: all on the CPU (then the backend places them) or all on the XLA device.
        options: See `CompileOptions`.
        mode: None, "default" or "reduce-overhead", which mean the same.

    Returns:
        A callable with the arguments and results of `gm`.

    Raises:
        TPUBackendError: Compilation failed, as one of its subclasses. torch wraps it in `BackendCompilerFailed`,
            as `.inner_exception`.
    """
    TELEMETRY.count("captures")
    accept_mode(mode)
    chosen = CompileOptions.from_dict(options)
    xla.device()
    if (version := earlier_version()) is not None:
        from kp_dynamo.legacy_backend import compile_with_stock

        log.configure()
        return compile_with_stock(gm, example_inputs, chosen, version)
    # Import modules that need torch_xla only after checking that it is installed in a supported version.
    from kp_dynamo.session import SESSION

    if "cache_size" in chosen.given:
        SESSION.resize(chosen.cache_size)
    return SESSION.as_backend(chosen)(gm, example_inputs)


kp_tpu.takes_block_calls = True  # type: ignore[attr-defined]  # blocks.block_calls.choose asks
kp_tpu.moves_log_calls = True  # type: ignore[attr-defined]  # compat.logging_calls asks
kp_tpu.traces_recurrent = True  # type: ignore[attr-defined]  # compat.recurrent_modules asks
kp_tpu.traces_padded_encoders = True  # type: ignore[attr-defined]  # compat.padded_encoders asks
kp_tpu.explain_devices = problem_of_devices  # type: ignore[attr-defined]  # compat.device_errors asks
kp_tpu.on_given_up = uncompiled_frames.report  # type: ignore[attr-defined]  # compat.given_up_frames asks


def cache_stats() -> dict[str, Any]:
    """Statistics of the compile cache: `size, max_size, hits, misses, hit_rate, evictions` of programs.

    "captures" holds the same for whole captures, which are looked up before AOTAutograd runs. "disk" is about the
    programs that XLA compiled or that came from the folder of `enable_disk_cache`, and its "captures" about those that
    were stored there or came from there.
    """
    from kp_dynamo.session import SESSION

    captures = dict(SESSION.captures.get_stats())
    return {**SESSION.runtime.cache.get_stats(), "captures": captures, "disk": disk_stats()}


def clear_cache() -> None:
    """Drop every compiled program and every copy on the device. Compiled functions in use recompile."""
    from kp_dynamo.session import SESSION

    SESSION.clear()


thread_state.install()
logging_calls.install()
recurrent_modules.install()
padded_encoders.install()
device_errors.install()
given_up_frames.install()
atexit.register(uncompiled_frames.warn_if_unused, kp_tpu)
# Dynamo traces before it calls a backend. By then its settings must be torch's, and XLA tensors with symbolic sizes
# must be traceable.
if "torch_xla" in sys.modules:
    importing.restore_torch()
    importing.patch_torch_xla()
