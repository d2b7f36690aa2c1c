"""XLA's devices and tensors, with the differences between versions of torch_xla hidden."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kp_dynamo.compat import fast_extremes, importing
from kp_dynamo.exceptions import TPUDeviceError

logger = logging.getLogger(__name__)


def xlac() -> Any:
    """torch_xla's C++ bindings. They are private in every version, but the bridge has no public API."""
    importing.refuse_fork()
    return importing.load()._XLAC


@functools.cache
def device() -> torch.device:
    """The XLA device of this process. The first call starts the client.

    Raises:
        TPUDeviceError: The device that PJRT_DEVICE names cannot be started, or this process was forked too late.
    """
    importing.refuse_fork()
    torch_xla = importing.load()
    with _device_errors():
        found = torch.device(torch_xla.device())
    if fast_extremes.is_on_cpu() and not fast_extremes.is_chosen():
        logger.warning(fast_extremes.LATE)
    began_with_spmd()
    return found


@functools.cache
def began_with_spmd() -> bool:
    """Whether the first device of this process was SPMD's virtual device. torch_xla 2.9 cannot change it later."""
    importing.load()
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
                "XLA. Try: use the device before the first backward of the process: call kp_dynamo.shard, or without "
                "it `import kp_dynamo, torch_xla` and torch.ones(1, device='xla')."
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


def is_started() -> bool:
    """Whether the XLA client of this process has started. It reads no flags after that."""
    return fast_extremes.is_client_started()


def synchronize(on: Sequence[torch.device] = ()) -> None:
    """Run the pending work of these devices, by default of the first one, and wait until it is done."""
    importing.refuse_fork()
    importing.load()
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
