"""The interface of a TPU's flash attention kernels. `lowering/flash_calls.py` calls them.

The pass `flash_attention` chooses the size of a block.

Shapes: N batch x heads, S queries, T keys, D width of a head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Part = Literal["forward", "train", "keys", "queries"]
"""Forward; forward with the statistics of its rows; gradients of keys and values; gradient of queries."""


@dataclass(frozen=True)
class FlashScoring:
    """How scores are computed from q @ k.

    Attributes:
        scale: Factor of q @ k.
        is_causal: Whether query i reads keys 0 to i.
        block: Number of queries, and of keys, in vector memory at a time; divides S and T.
    """

    scale: float
    is_causal: bool
    block: int


@dataclass(frozen=True)
class FlashKernel:
    """One kernel, for one set of sizes.

    Attributes:
        part: Which of the four.
        num_heads: N.
        num_queries: S.
        num_keys: T.
        width: D.
        dtype: Of operands and results: bfloat16 or float32.
        scoring: How scores are computed.
        precision: Precision of float32 matmuls: "default" is one bfloat16 pass, "highest" is float32.
    """

    part: Part
    num_heads: int
    num_queries: int
    num_keys: int
    width: int
    dtype: torch.dtype
    scoring: FlashScoring
    precision: Literal["default", "highest"]


class FlashCalls(Protocol):
    """Calls the kernels, on the operands of `kp::attention`: q [N, S, D], k [N, D, T], v [N, T, D]."""

    def takes(self, num_heads: int) -> bool:
        """Whether the kernels can be called for this N."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scoring: FlashScoring) -> Tensor: ...

    def attention_train(self, q: Tensor, k: Tensor, v: Tensor, scoring: FlashScoring) -> tuple[Tensor, Tensor]: ...

    def attention_backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], scoring: FlashScoring, factors: tuple[float, float]
    ) -> tuple[Tensor, Tensor, Tensor]: ...


_CALLS: ContextVar[FlashCalls | None] = ContextVar("kernels of the platform that is traced for", default=None)


@contextlib.contextmanager
def calling_flash(calls: FlashCalls | None) -> Iterator[None]:
    """Trace for a compiler that has the kernels; None for one that does not."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


def current_calls(num_heads: int) -> FlashCalls | None:
    """Calls the kernels of the platform that is traced for; None if it has none for this N."""
    calls = _CALLS.get()
    return calls if calls is not None and calls.takes(num_heads) else None
