"""Import torch_xla, and hide the differences between its versions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from kp_dynamo.compat import fast_extremes
from kp_dynamo.compat.versions import check_versions, earlier_version
from kp_dynamo.exceptions import TPUDeviceError, TPUNotAvailableError

logger = logging.getLogger(__name__)

# Whether this process lost the XLA client in a fork; every compiled call reads it.
forked = False


def _after_fork() -> None:
    global forked
    forked = load.cache_info().currsize > 0


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def load() -> ModuleType:
    """Import torch_xla and return it, without changing torch's settings.

    Raises:
        TPUNotAvailableError: torch_xla is missing or cannot be imported.
        TPUConfigurationError: Its version does not fit torch's.
    """
    check_versions()
    import torch._dynamo.config as dynamo_config

    # torch_xla 2.9 changes both settings for every backend of the process.
    before = {name: getattr(dynamo_config, name) for name in ("automatic_dynamic_shapes", "specialize_float")}
    # Without an explicit device, torch_xla probes for a TPU's metadata server before it uses the CPU.
    if fast_extremes.is_on_cpu():
        os.environ["PJRT_DEVICE"] = "CPU"
    fast_extremes.keep_nan()
    is_first, gru = "torch_xla" not in sys.modules, torch.nn.GRU
    try:
        torch_xla = importlib.import_module("torch_xla")
    except (ImportError, OSError) as cause:
        raise TPUNotAvailableError(f"torch_xla is installed but cannot be imported: {cause}") from cause
    finally:
        # Earlier bridges fail at symbolic sizes, so they keep torch_xla's settings.
        for name, value in before.items() if earlier_version() is None else ():
            setattr(dynamo_config, name, value)
        if is_first:
            # torch_xla 2.9 replaces it with its own GRU, which fails on the CPU.
            torch.nn.GRU = gru  # type: ignore[misc]
    patch_torch_xla()
    return torch_xla


def patch_torch_xla() -> None:
    """Patch torch_xla so that threads and Dynamo can trace on XLA tensors. Only on 2.9; import torch_xla first."""
    if earlier_version() is not None:
        return
    from kp_dynamo.compat import lock, scan_gru, symbolic_layer_norm

    symbolic_layer_norm.install()
    scan_gru.install()
    lock.install()


def refuse_fork() -> None:
    """Raise if this process lost the XLA client in a fork.

    Raises:
        TPUDeviceError: This process was forked after the client had started.
    """
    if forked:
        raise TPUDeviceError(
            "this process was forked after the XLA client had started, and a fork does not copy the client's threads. "
            'Try: start workers with multiprocessing.get_context("spawn"), or fork before the first compiled call.'
        )


def xlac() -> Any:
    """torch_xla's C++ bindings. They are private in every version, but the bridge has no public API."""
    refuse_fork()
    return load()._XLAC


@functools.cache
def device() -> torch.device:
    """The XLA device of this process. The first call starts the client.

    Raises:
        TPUDeviceError: The device that PJRT_DEVICE names cannot be started.
    """
    torch_xla = load()
    with _device_errors():
        found = torch.device(torch_xla.device())
    if fast_extremes.is_on_cpu() and not fast_extremes.is_chosen():
        logger.warning(fast_extremes.LATE)
    began_with_spmd()
    return found


@functools.cache
def began_with_spmd() -> bool:
    """Whether the first device of this process was SPMD's virtual device. torch_xla 2.9 cannot change it later."""
    load()
    import torch_xla.runtime

    return bool(torch_xla.runtime.is_spmd())


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as cause:
        wanted = os.environ.get("PJRT_DEVICE", "")
        raise TPUDeviceError(
            f"no XLA device: PJRT_DEVICE={wanted!r} could not be started ({str(cause).splitlines()[0]}). "
            "Allowed: CPU, or TPU on a machine that has one. Try: set PJRT_DEVICE=CPU."
        ) from cause


@functools.cache
def require_backward() -> None:
    """Raise if autograd has no thread for XLA tensors.

    torch starts its autograd threads at the first backward, one for each device that exists then. A device that starts
    later gets no thread.

    Raises:
        TPUDeviceError: A backward ran on the CPU before the XLA device was first used.
    """
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.ones(1, device=device(), requires_grad=True)
        try:
            probe.sum().backward()
        except RuntimeError as cause:
            if "device_ready_queues_" not in str(cause):
                raise
            raise TPUDeviceError(
                "a backward ran on the CPU before the XLA device was first used, so torch has no autograd thread for "
                "XLA. Try: use the device once at the start of the process, after `import kp_dynamo`: "
                "torch.ones(1, device=torch_xla.device())."
            ) from cause


def optimization_barrier(tensors: list[torch.Tensor]) -> None:
    """Put an optimization barrier on XLA tensors, in place (torch_xla 2.9; its public function does the same)."""
    xlac()._xla_optimization_barrier_(tensors)


def fetch(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy materialized XLA tensors to the CPU, in one transfer.

    `detach` and `.cpu()` one by one would compile a program for each tensor, and an alias misleads torch_xla's bridge.
    """
    with torch.no_grad():
        return list(xlac()._xla_get_cpu_tensors(tensors))


def materialize(tensors: list[torch.Tensor]) -> None:
    """Allocate the buffers of XLA tensors that depend on no others; until then torch_xla only holds a lazy graph."""
    xlac()._xla_sync_multi(tensors, devices=[], wait=False, sync_xla_data=False)


def device_kind() -> str:
    """ "CPU", "TPU" or PJRT's name of another device."""
    load()
    import torch_xla.runtime

    return str(torch_xla.runtime.device_type())


# XLA's names of the chips (torch_xla 2.9 passes on PJRT's).
_CHIP_OF_KIND = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "v7",
    "TPU v7": "v7",
}


def chip_name() -> str | None:
    """The chip of this machine, as named in `hardware.py`; None if the device is not a TPU. Starts the client.

    Raises:
        TPUDeviceError: The TPU's generation is unknown.
    """
    if device_kind() != "TPU":
        return None
    kind = _kind_of_chip()
    if kind not in _CHIP_OF_KIND:
        raise TPUDeviceError(
            f"the device {kind!r} is unknown. Known: {', '.join(_CHIP_OF_KIND)}. Try: name the most similar chip with "
            "config.hardware.tpu.version, or the option 'target'."
        )
    return _CHIP_OF_KIND[kind]


def _kind_of_chip() -> str:
    device()
    if not hasattr(xlac(), "_xla_device_kind"):  # torch_xla 2.5 does not say
        return "TPU"
    if not began_with_spmd():
        return str(xlac()._xla_device_kind(str(device())))
    # torch_xla 2.9 would ask SPMD's virtual device, which has no kind. libtpu names the chip among its versions, on a
    # line such as "TFRT TPU v5 lite".
    lines = str(xlac()._xla_get_platform_version()).splitlines()
    return next((line.removeprefix("TFRT ") for line in lines if line.startswith("TFRT TPU")), "TPU")


def is_started() -> bool:
    """Whether the XLA client of this process has started. It reads no flags after that."""
    return fast_extremes.is_client_started()


def synchronize(on: Sequence[torch.device] = ()) -> None:
    """Run the pending work of these devices, by default of the first one, and wait until it is done."""
    refuse_fork()
    load()
    import torch_xla.core.xla_model

    for found in on or [device()]:
        # torch_xla 2.9: its public `sync` takes no device.
        xlac()._xla_step_marker(str(found), [], wait=True, reset_scope=True)
    torch_xla.core.xla_model.wait_device_ops()


def devices() -> list[torch.device]:
    """The XLA devices that this process can use, in order."""
    device()
    return [torch.device("xla", index) for index in range(xlac()._xla_num_devices())]


def num_devices() -> int:
    """Physical devices of the job, also under SPMD. Starts the client, but does not fix whether SPMD is on.

    Raises:
        TPUDeviceError: The device that PJRT_DEVICE names cannot be started.
    """
    with _device_errors():
        return len(xlac()._xla_get_all_runtime_devices())


def world() -> tuple[int, int]:
    """The number of processes of this job, and the index of this process."""
    device()
    return int(xlac()._xla_get_num_processes()), int(xlac()._xla_get_process_index())


def memory_info(of: torch.device | None = None) -> dict[str, int] | None:
    """Used and total bytes of the device's memory, as XLA counts them; None if the device does not count."""
    import torch_xla.core.xla_model

    try:
        info = torch_xla.core.xla_model.get_memory_info(of or device())
    except RuntimeError as problem:
        # torch_xla 2.9 cannot query a single device under SPMD.
        if "UNIMPLEMENTED" not in str(problem) and "not supported for SPMD" not in str(problem):
            raise
        return None
    return {name: int(value) for name, value in info.items()}
