"""Device memory: tensors given out and accounted for, pools of buffers, layout, and figures that are measured."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import threading
import time
from collections import deque
from typing import Any, Literal, NamedTuple

import torch

from kp_dynamo.api.environment import checked_config, deciding_chip, start_device
from kp_dynamo.api.memory.live_account import LiveAccount
from kp_dynamo.api.memory.pool import BufferKind, TensorPool
from kp_dynamo.api.memory.stats import (
    Allocation,
    TPUMemoryStats,
    checked_dtype,
    checked_shape,
)
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.config.translation import require_enabled
from kp_dynamo.exceptions import TPUMemoryError, TPUMemoryPoolError, TPUOutOfMemoryError
from kp_dynamo.hardware import GB

logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 10_000  # allocations, however long they are to be remembered: a loop makes millions in an hour


class _InUse(NamedTuple):
    """Bytes, as in `TPUMemoryStats`."""

    source: Literal["xla", "accounting"]
    allocated: int
    available: int
    total: int
    peak: int


class TPUMemoryManager:
    """Gives out device memory within a budget, and says how much is in use. Thread-safe.

    The budget is the memory of the device (of the configured chip, where XLA does not count) x `memory_fraction`.

    Args:
        tpu_config: Its `version`, `memory_fraction`, `v6e_memory_gb` and `v7_memory_gb` make the
            budget; its retention and monitoring times are the defaults here; with `enable_strict_validation` a
            tensor that a pool does not take back raises.

    Raises:
        TPUBackendError: The device cannot be had as asked, see `start_device`.
    """

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        start_device(self.config)
        self.device = xla.device()
        self.chip = deciding_chip(self.config)
        self._account = LiveAccount()
        self._history: deque[Allocation] = deque(maxlen=_MOST_REMEMBERED)
        self._pools: dict[str, TensorPool] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def allocate_tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Zeros on the device, in memory that is there when this returns.

        Raises:
            TPUMemoryError: The shape or the dtype is none.
            TPUOutOfMemoryError: It is more than what is available; nothing was allocated.
            TPUNotAvailableError: The configuration switches the TPU off by now.
        """
        require_enabled(self.config)
        kind = BufferKind(checked_shape(shape), checked_dtype(dtype))
        with self._lock:
            self._require_room(kind.num_bytes, f"a tensor {kind.dtype}{list(kind.shape)}")
            try:
                # A pool hands its buffers to callers in any mode; one made in inference mode would bind them to it.
                with torch.inference_mode(False), torch.no_grad():
                    tensor = torch.zeros(kind.shape, dtype=kind.dtype, device=self.device)
                    xla.materialize([tensor])
            except RuntimeError as cause:
                raise _device_refuses(kind, cause) from cause
            self._remember(tensor)
        return tensor

    def optimize_tensor_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` with zeros behind its last two dimensions, so that they fill the tiles of the chip.

        The sizes are those of `Chip.tiled_shape`; `result[..., :rows, :columns]` is the tensor again. Products whose
        contracted dimension is padded on both sides keep their values; a softmax or a mean over padding does not.
        Where nothing is missing, or nothing is there, the tensor itself is returned. Differentiable; the device stays.

        Raises:
            TPUOutOfMemoryError: The padded tensor is more than what is available.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TPUMemoryError(f"the tensor is a {type(tensor).__qualname__}; give a torch.Tensor")
        tiled = self.chip.tiled_shape(tensor.shape, tensor.element_size())
        if tiled == tuple(tensor.shape) or not tensor.numel():
            return tensor
        missing = [after - before for before, after in zip(tensor.shape, tiled, strict=True)]
        behind = [amount for size in reversed(missing) for amount in (0, size)]
        if tensor.device.type != self.device.type:
            return torch.nn.functional.pad(tensor, behind)  # none of the memory that is managed here
        require_enabled(self.config)
        with self._lock:
            self._require_room(math.prod(tiled) * tensor.element_size(), f"a tensor padded to {list(tiled)}")
            padded = torch.nn.functional.pad(tensor, behind)
            self._remember(padded)
        return padded

    def create_memory_pool(
        self, pool_size: int, tensor_size: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> str:
        """A pool of at most `pool_size` buffers; each is allocated when it is first needed.

        Returns:
            The pool's id.

        Raises:
            TPUMemoryPoolError: The size is no int >= 1.
            TPUOutOfMemoryError: All buffers together are more than what is available now.
        """
        require_enabled(self.config)
        if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
            raise TPUMemoryPoolError(f"the pool's size is {pool_size!r}; allowed: an int >= 1")
        kind = BufferKind(checked_shape(tensor_size), checked_dtype(dtype))
        self._require_room(pool_size * kind.num_bytes, f"a pool of {pool_size} x {kind.dtype}{list(kind.shape)}")
        pool_id = f"pool_{next(self._numbers)}"
        self._pools[pool_id] = TensorPool(
            pool_id, pool_size, kind, lambda: self.allocate_tensor(kind.shape, kind.dtype)
        )
        return pool_id

    def get_tensor_from_pool(self, pool_id: str) -> torch.Tensor:
        """A buffer that nobody else has. It holds what its last borrower left in it.

        Raises:
            TPUMemoryPoolError: There is no such pool, or all its buffers are lent.
            TPUOutOfMemoryError: A new buffer is more than what is available.
        """
        return self._pool(pool_id).take()

    def return_tensor_to_pool(self, pool_id: str, tensor: torch.Tensor) -> bool:
        """Give a buffer back; do not use it afterwards.

        Returns:
            Whether the pool took it. False, with a warning in the log: it is another pool's or nobody's, was returned
            before, or has another shape or dtype by now.

        Raises:
            TPUMemoryPoolError: There is no such pool; or, with `enable_strict_validation`, in the place of False.
        """
        refusal = self._pool(pool_id).give_back(tensor)
        if not refusal:
            return True
        text = f"{pool_id} does not take a tensor: {refusal}. Return each tensor once, to the pool it came from."
        if self.config.enable_strict_validation:
            raise TPUMemoryPoolError(text)
        logger.warning(text)
        return False

    def get_pool_stats(self) -> dict[str, Any]:
        """`total_pools`, `reserved_bytes`, and under `pool_details` what each pool says of itself, by id."""
        details = {pool_id: pool.get_stats() for pool_id, pool in list(self._pools.items())}
        reserved = sum(detail["reserved_bytes"] for detail in details.values())
        return {"total_pools": len(details), "reserved_bytes": reserved, "pool_details": details}

    def get_memory_stats(self) -> TPUMemoryStats:
        """What is in use now, measured: see `TPUMemoryStats.source`."""
        in_use = self._in_use()
        return TPUMemoryStats(
            source=in_use.source,
            allocated_memory=in_use.allocated,
            reserved_memory=sum(pool.held_bytes() for pool in list(self._pools.values())),
            available_memory=in_use.available,
            total_memory=in_use.total,
            peak_memory=in_use.peak,
            memory_fraction=self.config.memory_fraction,
            active_tensors=self._account.num_tensors(),
            timestamp=time.time(),
        )

    def get_allocation_history(self) -> list[Allocation]:
        """Tensors given out in the last `allocation_history_retention_seconds`, oldest first; at most 10,000."""
        with self._lock:
            self._forget_old()
            return list(self._history)

    def monitor_memory(self, interval: float | None = None, duration: float | None = None) -> list[TPUMemoryStats]:
        """Look at the memory every `interval` seconds, at once and for `duration` seconds at most.

        A look that would come late is left out, so that the call never takes longer than asked, but for its last look.

        Args:
            interval: Seconds, above 0; None: the configuration's.
            duration: Seconds, from 0; None: the configuration's.
        """
        every = _seconds("interval", self.config.monitoring_interval_seconds if interval is None else interval)
        lasting = _seconds("duration", self.config.monitoring_duration_seconds if duration is None else duration)
        if not every:
            raise TPUMemoryError("the interval is 0; allowed: seconds above 0")
        start, looks = time.monotonic(), [self.get_memory_stats()]
        while (due := (math.floor((time.monotonic() - start) / every) + 1) * every) <= lasting:
            time.sleep(max(0.0, start + due - time.monotonic()))
            looks.append(self.get_memory_stats())
        return looks

    def optimize_memory_usage(self) -> dict[str, int]:
        """Let go of what nobody uses: idle buffers of the pools, reference cycles, allocations past their retention.

        Returns:
            `freed_bytes`, by which this manager's own tensors have shrunk; `idle_bytes` of them from pools;
            `forgotten_allocations`.
        """
        before, remembered = self._account.num_bytes(), len(self._history)
        idle = sum(pool.drop_idle() for pool in list(self._pools.values()))
        gc.collect()
        forgotten = remembered - len(self.get_allocation_history())
        freed = before - self._account.num_bytes()
        return {"freed_bytes": freed, "idle_bytes": idle, "forgotten_allocations": forgotten}

    def clear_memory_pools(self) -> None:
        """Forget every pool. Buffers that are lent stay their borrowers', and cannot be returned any more."""
        self._pools.clear()

    def _pool(self, pool_id: str) -> TensorPool:
        try:
            return self._pools[pool_id]
        except (KeyError, TypeError):
            known = ", ".join(self._pools) or "there is none; make one with create_memory_pool"
            raise TPUMemoryPoolError(f"there is no pool {pool_id!r}; known: {known}") from None

    def _in_use(self) -> _InUse:
        """XLA's figures, else our own. Asks no pool: a pool that waits for memory holds its own lock."""
        told, share = xla.memory_info(self.device), self.config.memory_fraction
        if told is None:
            total, allocated = int(self.chip.hbm_bytes), self._account.num_bytes()
            available = max(0, int(total * share) - allocated)
            return _InUse("accounting", allocated, available, total, self._account.peak_bytes())
        total, allocated = told["bytes_limit"], told["bytes_used"]
        available = max(0, int(total * share) - allocated)
        return _InUse("xla", allocated, available, total, told.get("peak_bytes_used", allocated))

    def _require_room(self, num_bytes: int, what: str) -> None:
        now = self._in_use()
        if num_bytes > now.available:
            raise TPUOutOfMemoryError(
                f"{what} takes {num_bytes / GB:.3f} GB; available are {now.available / GB:.3f} GB: "
                f"{self.config.memory_fraction:g} of the {now.total / GB:.3f} GB of a {self.chip.name}, less "
                f"{now.allocated / GB:.3f} GB in use ({now.source}). Drop tensors, call optimize_memory_usage(), or "
                "raise memory_fraction."
            )

    def _remember(self, tensor: torch.Tensor) -> None:
        self._account.add(tensor)
        self._forget_old()
        num_bytes = tensor.numel() * tensor.element_size()
        self._history.append(Allocation(time.time(), tuple(tensor.shape), tensor.dtype, num_bytes))

    def _forget_old(self) -> None:
        oldest = time.time() - self.config.allocation_history_retention_seconds
        while self._history and self._history[0].timestamp < oldest:
            self._history.popleft()


def _device_refuses(kind: BufferKind, cause: RuntimeError) -> TPUMemoryError:
    first = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    is_full = "RESOURCE_EXHAUSTED" in str(cause) or "out of memory" in str(cause).lower()
    error = TPUOutOfMemoryError if is_full else TPUMemoryError
    return error(f"the device does not give a tensor {kind.dtype}{list(kind.shape)}: {first}")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise TPUMemoryError(f"the {name} is {value!r}; allowed: seconds, finite, from 0 on")
    return float(value)
