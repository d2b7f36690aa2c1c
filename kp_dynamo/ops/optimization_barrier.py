"""`kp::optimization_barrier` and `kp::wait_for_all`: identities that restrict the order of a program.

    optimization_barrier(values, signal) -> [*values, signal]
    wait_for_all(values) -> values

XLA schedules recomputed nodes as early as their operands allow, all segments at once, so gradient checkpointing would
free no memory. A segment that reads `optimization_barrier(saved values, incoming gradient)` cannot run before its
gradient is computed. The operator has two forms, neither of which changes a value:

TPU  an optimization barrier over values and signal: the scheduler keeps the order, and nothing is copied. XLA prunes a
     barrier's unused results with their dependencies, so something must read the returned signal;
CPU  `where(signal[0] > inf, 0, value)`, which no compiler can simplify to `value`: XLA:CPU drops barriers.

`wait_for_all` is for speed alone: on a TPU no result can be read before all values are computed, and a value is fused
into no reader. Elsewhere, and on several devices, it does nothing: a gradient would wait for its reduction over the
devices, which should overlap with the rest of the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

Barrier = Callable[[list[Tensor]], None]
"""Makes XLA tensors wait for each other, in place."""

_BARRIER: ContextVar[Barrier | None] = ContextVar("barrier of the platform that is traced for", default=None)

_library = torch.library.Library("kp", "FRAGMENT")
_library.define("optimization_barrier(Tensor[] values, Tensor signal) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
_library.define("wait_for_all(Tensor[] values) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)


_WAITS: ContextVar[bool] = ContextVar("whether wait_for_all is a barrier too", default=True)


@contextlib.contextmanager
def barriers(barrier: Barrier | None, *, waits: bool = True) -> Iterator[None]:
    """Trace for a compiler that keeps barriers; None for one that drops them.

    `waits` is False for several chips, where `wait_for_all` does nothing.
    """
    tokens = _BARRIER.set(barrier), _WAITS.set(waits)
    try:
        yield
    finally:
        _BARRIER.reset(tokens[0])
        _WAITS.reset(tokens[1])


def _on_xla(values: list[Tensor], signal: Tensor) -> list[Tensor]:
    barrier = _BARRIER.get()
    if barrier is None:
        return _depending(values, signal)
    return _behind(barrier, [*values, signal])


def _behind(barrier: Barrier, values: list[Tensor]) -> list[Tensor]:
    held = copies(values)  # the barrier is in-place, and must not change arguments
    barrier(held)
    return held


def _wait_on_xla(values: list[Tensor]) -> list[Tensor]:
    barrier = _BARRIER.get() if _WAITS.get() else None
    return copies(values) if barrier is None else _behind(barrier, values)


def copies(values: list[Tensor]) -> list[Tensor]:
    """The values; on XLA nothing is copied."""
    return [tensor.clone() for tensor in values]


def _depending(values: list[Tensor], signal: Tensor) -> list[Tensor]:
    never = signal.reshape(-1)[:1].reshape(()) > torch.inf
    zeros = (torch.zeros((), dtype=value.dtype, device=value.device) for value in values)
    return [*(torch.where(never, zero, value) for zero, value in zip(zeros, values, strict=True)), signal.clone()]


def held(value: Tensor) -> Tensor:
    """A value that the TPU's compiler materializes once and fuses into no consumer; elsewhere the value itself."""
    kept: Tensor = value if not keeps_barriers() else torch.ops.kp.optimization_barrier([], value)[0]
    return kept


def _on_cpu(values: list[Tensor], signal: Tensor) -> list[Tensor]:
    return copies([*values, signal])


_library.impl("optimization_barrier", _on_cpu, "CPU")
_library.impl("optimization_barrier", _on_xla, "XLA")
_library.impl("wait_for_all", copies, "CPU")
_library.impl("wait_for_all", _wait_on_xla, "XLA")


def _fake(values: list[Tensor], signal: Tensor) -> list[Tensor]:
    return _fake_wait([*values, signal])


def _fake_wait(values: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in values]


torch.library.register_fake("kp::optimization_barrier", _fake, lib=_library)
torch.library.register_fake("kp::wait_for_all", _fake_wait, lib=_library)


def keeps_barriers() -> bool:
    """Whether the trace is for a TPU's compiler."""
    return _BARRIER.get() is not None
