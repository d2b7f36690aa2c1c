"""The flag that makes maxima and minima on XLA:CPU keep a NaN. XLA reads it once, when its client starts."""

from __future__ import annotations

import os
import sys

FLAG = "--xla_cpu_enable_fast_min_max=false"
LATE = (
    "the XLA client of this process started before kp_dynamo was imported, without the flag "
    f"{FLAG}: on XLA's CPU device, maxima, minima and max pooling drop a NaN that eager keeps. Try: import kp_dynamo "
    f"before the first use of the XLA device, or set XLA_FLAGS={FLAG} in the environment of the process."
)


def keep_nan() -> None:
    """Add the flag to XLA_FLAGS, unless the user set it or the client has started. Does not import torch_xla."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not is_chosen() and is_on_cpu() and not is_client_started():
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()


def is_chosen() -> bool:
    """Whether the user set this flag in XLA_FLAGS."""
    return "xla_cpu_enable_fast_min_max" in os.environ.get("XLA_FLAGS", "")


def is_on_cpu() -> bool:
    """Whether torch_xla uses XLA's CPU device: PJRT_DEVICE is CPU, or it is unset and the machine has no TPU."""
    named = os.environ.get("PJRT_DEVICE")
    has_tpu = os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0")
    return named == "CPU" or (named is None and not has_tpu)


def is_client_started() -> bool:
    """Whether the XLA client of this process has started. It reads no flags after that."""
    bindings = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    return bindings is not None and bool(bindings._xla_runtime_is_initialized())
