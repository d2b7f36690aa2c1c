"""`TPUMemoryManager`: allocation within a budget, pools, tile padding and memory statistics."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import threading
import time
from collections import deque
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kp_dynamo.api.environment import checked_config, deciding_chip, of_type, start_device
from kp_dynamo.api.memory.pool import TensorPool
from kp_dynamo.api.memory.stats import Allocation, TPUMemoryStats
from kp_dynamo.compat import xla
from kp_dynamo.config.tpu_config import TPUConfig
from kp_dynamo.config.translation import require_enabled
from kp_dynamo.exceptions import TPUMemoryError, TPUMemoryPoolError, TPUOutOfMemoryError
from kp_dynamo.hardware import GB

logger = logging.getLogger(__name__)

_MOST_REMEMBERED = 10_000  # allocations, whatever the retention: a loop makes millions in an hour


class TPUMemoryManager:
    """Allocates device memory within a budget and reports how much is in use. Thread-safe.

    The budget is the device's memory (the configured chip's, if XLA reports none) x `memory_fraction`. An unknown pool
    raises a TPUMemoryPoolError, and a device that cannot be used as configured a TPUBackendError, see `start_device`.
    """

    def __init__(self, tpu_config: TPUConfig) -> None:
        self.config = checked_config(tpu_config)
        start_device(self.config)
        self.device = xla.device()
        self.chip = deciding_chip(self.config)
        # Bytes of the live storages: a view keeps the memory of its base alive.
        self._live: Any = WeakIdKeyDictionary()
        self._history: deque[Allocation] = deque(maxlen=_MOST_REMEMBERED)
        self._pools: dict[str, TensorPool] = {}
        self._numbers = itertools.count(1)
        # Reentrant: a pool that needs a tensor allocates it here.
        self._lock = threading.RLock()

    def allocate_tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate zeros on the device; the memory is materialized when this returns.

        Raises:
            TPUMemoryError: The shape or the dtype is invalid.
            TPUOutOfMemoryError: The tensor exceeds the available memory; nothing was allocated.
        """
        require_enabled(self.config)
        like = _described(shape, dtype)
        with self._lock:
            self._require_room(like.nbytes, f"a tensor {dtype}{list(shape)}")
            try:
                # Pool buffers are used in any mode, but an inference tensor could be written only in inference mode.
                with torch.inference_mode(False), torch.no_grad():
                    tensor = torch.zeros(shape, dtype=dtype, device=self.device)
                    xla.materialize([tensor])
            except RuntimeError as cause:
                is_full = "RESOURCE_EXHAUSTED" in str(cause) or "out of memory" in str(cause).lower()
                error = TPUOutOfMemoryError if is_full else TPUMemoryError
                first = (str(cause) or type(cause).__name__).splitlines()[0]
                raise error(f"the device cannot allocate a tensor {dtype}{list(shape)}: {first}") from cause
            self._remember(tensor)
        return tensor

    def optimize_tensor_layout(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pad the last two dimensions of `tensor` with zeros to the tiles of the chip.

        The sizes are those of `Chip.tiled_shape`; `result[..., :rows, :columns]` recovers the tensor. A matmul whose
        contracted dimension is padded in both operands keeps its values; a softmax or a mean over padding does not.
        A tensor that needs no padding or is empty is returned as is. Differentiable; the device does not change.

        Raises:
            TPUOutOfMemoryError: The padded tensor exceeds the available memory.
        """
        of_type(torch.Tensor, "tensor", tensor, TPUMemoryError, "a torch.Tensor")
        tiled = self.chip.tiled_shape(tensor.shape, tensor.element_size())
        if tiled == tuple(tensor.shape) or not tensor.numel():
            return tensor
        missing = [after - before for before, after in zip(tensor.shape, tiled, strict=True)]
        padding = [amount for size in reversed(missing) for amount in (0, size)]
        if tensor.device.type != self.device.type:
            return torch.nn.functional.pad(tensor, padding)  # not in the memory that is managed here
        require_enabled(self.config)
        with self._lock:
            self._require_room(math.prod(tiled) * tensor.element_size(), f"a tensor padded to {list(tiled)}")
            padded = torch.nn.functional.pad(tensor, padding)
            self._remember(padded)
        return padded

    def create_memory_pool(
        self, pool_size: int, tensor_size: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> str:
        """Create a pool of at most `pool_size` tensors, each allocated on first use; returns its id.

        Raises:
            TPUMemoryPoolError: The size is not an int >= 1.
            TPUOutOfMemoryError: All tensors together exceed the memory that is available now.
        """
        require_enabled(self.config)
        if type(pool_size) is not int or pool_size < 1:
            raise TPUMemoryPoolError(f"pool_size={pool_size!r} is invalid. Allowed: an int >= 1.")
        like = _described(tensor_size, dtype)
        with self._lock:
            self._require_room(pool_size * like.nbytes, f"a pool of {pool_size} x {dtype}{list(tensor_size)}")
            name = f"pool_{next(self._numbers)}"
            self._pools[name] = TensorPool(name, pool_size, like, lambda: self.allocate_tensor(like.shape, dtype))
        return name

    def get_tensor_from_pool(self, pool_id: str) -> torch.Tensor:
        """Take a free tensor. It keeps the values of its last use.

        Raises:
            TPUMemoryPoolError: All tensors of the pool are in use.
            TPUOutOfMemoryError: A new tensor exceeds the available memory.
        """
        with self._lock:
            return self._pool(pool_id).take()

    def return_tensor_to_pool(self, pool_id: str, tensor: torch.Tensor) -> bool:
        """Return a tensor to its pool; do not use it afterwards.

        A tensor that is not from this pool, was already returned, or now has another shape or dtype is rejected: the
        result is False, with a logged warning, or with `enable_strict_validation` a TPUMemoryPoolError.
        """
        with self._lock:
            refusal = self._pool(pool_id).give_back(tensor)
        if not refusal:
            return True
        text = f"{pool_id} rejects a tensor: {refusal}. Try: return each tensor once, to the pool it came from."
        if self.config.enable_strict_validation:
            raise TPUMemoryPoolError(text)
        logger.warning(text)
        return False

    def get_pool_stats(self) -> dict[str, Any]:
        """`total_pools`, `reserved_bytes`, and under `pool_details` the statistics of each pool, by id."""
        with self._lock:
            details = {pool_id: pool.get_stats() for pool_id, pool in self._pools.items()}
        reserved = sum(detail["reserved_bytes"] for detail in details.values())
        return {"total_pools": len(details), "reserved_bytes": reserved, "pool_details": details}

    def get_memory_stats(self) -> TPUMemoryStats:
        """The memory in use now; `TPUMemoryStats.source` says how it is measured."""
        measured = xla.memory_info(self.device)
        with self._lock:
            mine = {"bytes_used": sum(self._live.values()), "bytes_limit": int(self.chip.of_a_device().hbm_bytes)}
            num_tensors, reserved = len(self._live), self.get_pool_stats()["reserved_bytes"]
        found = mine if measured is None else measured
        used, total = found["bytes_used"], found["bytes_limit"]
        return TPUMemoryStats(
            source="accounting" if measured is None else "xla",
            allocated_memory=used,
            reserved_memory=reserved,
            available_memory=max(0, int(total * self.config.memory_fraction) - used),
            total_memory=total,
            memory_fraction=self.config.memory_fraction,
            active_tensors=num_tensors,
            timestamp=time.time(),
        )

    def get_allocation_history(self) -> list[Allocation]:
        """Allocations of the last `allocation_history_retention_seconds`, oldest first; at most 10,000."""
        oldest = time.time() - self.config.allocation_history_retention_seconds
        with self._lock:
            return [allocation for allocation in self._history if allocation.timestamp >= oldest]

    def monitor_memory(self, interval: float | None = None, duration: float | None = None) -> list[TPUMemoryStats]:
        """Sample the memory now and then every `interval` seconds, for at most `duration` seconds.

        A late sample is skipped, so the call takes no longer than `duration` plus one sample. `interval` must be > 0
        and `duration` >= 0; None: the configuration's.
        """
        every = self.config.monitoring_interval_seconds if interval is None else interval
        lasting = self.config.monitoring_duration_seconds if duration is None else duration
        if not (every and all(isinstance(t, int | float) and 0 <= t < math.inf for t in (every, lasting))):
            raise TPUMemoryError(f"interval={every!r}, duration={lasting!r} is invalid. Allowed: finite, interval > 0.")
        start, looks = time.monotonic(), [self.get_memory_stats()]
        while (due := (math.floor((time.monotonic() - start) / every) + 1) * every) <= lasting:
            time.sleep(max(0.0, start + due - time.monotonic()))
            looks.append(self.get_memory_stats())
        return looks

    def optimize_memory_usage(self) -> dict[str, int]:
        """Free unused memory: idle tensors of pools, and reference cycles.

        Returns:
            `freed_bytes`: how much the live tensors of this manager shrank; `idle_bytes`: the part from pools.
        """
        with self._lock:
            before = sum(self._live.values())
            idle = sum(pool.drop_idle() for pool in self._pools.values())
            gc.collect()
            return {"freed_bytes": before - sum(self._live.values()), "idle_bytes": idle}

    def clear_memory_pools(self) -> None:
        """Remove every pool. Tensors in use stay valid but can no longer be returned."""
        with self._lock:
            self._pools.clear()

    def _pool(self, pool_id: str) -> TensorPool:
        try:
            return self._pools[pool_id]
        except (KeyError, TypeError):
            known = ", ".join(self._pools) or "none. Try: create_memory_pool"
            raise TPUMemoryPoolError(f"pool_id={pool_id!r} is unknown. Allowed: {known}.") from None

    def _require_room(self, num_bytes: int, what: str) -> None:
        now = self.get_memory_stats()
        if num_bytes > now.available_memory:
            raise TPUOutOfMemoryError(
                f"{what} takes {num_bytes / GB:.3f} GB, but only {now.available_memory / GB:.3f} GB are available: "
                f"{now.memory_fraction:g} of the {now.total_memory / GB:.3f} GB of a {self.chip.name}, less "
                f"{now.allocated_memory / GB:.3f} GB in use ({now.source}). Try: drop tensors, call "
                "optimize_memory_usage(), or raise memory_fraction."
            )

    def _remember(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._live[storage] = storage.nbytes()
        self._history.append(Allocation(time.time(), tuple(tensor.shape), tensor.dtype, tensor.nbytes))


def _described(shape: object, dtype: object) -> torch.Tensor:
    """A tensor without memory of this shape and dtype; a TPUMemoryError if one is invalid."""
    if not isinstance(shape, tuple | list) or not all(type(size) is int and size >= 0 for size in shape):
        raise TPUMemoryError(f"shape={shape!r} is invalid. Allowed: a tuple of ints >= 0 such as (512, 512).")
    if not isinstance(dtype, torch.dtype):
        raise TPUMemoryError(f"dtype={dtype!r} is invalid. Allowed: a torch.dtype such as torch.float32.")
    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError) as cause:  # its number of bytes overflows
        raise TPUOutOfMemoryError(f"a tensor {dtype}{list(shape)} exceeds every memory. Try: smaller sizes.") from cause
