"""Tensors on the CPU and their copies on the XLA device.

A copy of a parameter is made once, and again only when the parameter's *bytes* have changed. Version counters cannot
tell: they do not move for `p.data.add_()`, `p.data = t`, a numpy write or a fused optimizer.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils.weak import WeakIdKeyDictionary

from kp_dynamo.compat import xla

logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    digest: tuple[object, ...]
    on_device: torch.Tensor


class Placement:
    """Copies on the XLA device of CPU tensors that are seen again: parameters, buffers, repeated inputs.

    A tensor seen for the first time that is no parameter is passed on as it is, and the program transfers it:
    most inputs come once. Entries go when their CPU tensor does. Thread-safe.
    """

    def __init__(self) -> None:
        self._copies: Any = WeakIdKeyDictionary()
        self._seen: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()
        self._told = False

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the bytes of `tensor` that a program takes: a copy on the device, or `tensor` itself."""
        if tensor.device.type == "xla":
            return tensor
        with self._lock:
            if not isinstance(tensor, torch.nn.Parameter) and tensor not in self._seen:
                self._seen[tensor] = True
                return _plain(tensor)
            known, digest = self._copies.get(tensor), digest_of(tensor)
            if known is not None and known.digest == digest:
                return known.on_device  # type: ignore[no-any-return]
            copy = _Copy(digest, _plain(tensor).to(xla.device()))
            self._copies[tensor] = copy
        self._tell(tensor)
        return copy.on_device

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` for a program that takes the buffer of what it is given: never a copy that is kept."""
        if tensor.device.type == "xla":
            return tensor
        with self._lock:
            self._copies.pop(tensor, None)  # the caller is about to change the tensor
            return _plain(tensor)

    def clear(self) -> None:
        """Drop every copy."""
        with self._lock:
            self._copies.clear()
            self._seen.clear()

    def _tell(self, tensor: torch.Tensor) -> None:
        if not self._told:
            self._told = True
            logger.info(
                "CPU tensors are copied to %s: parameters once and when their bytes change, inputs and outputs every "
                "call. To avoid it, move model and inputs there once: model.to('xla').",
                xla.device(),
            )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Values as stored: without autograd, pending conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg()


def digest_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, strides, dtype and a 128-bit hash (XXH3) of the bytes of a dense CPU tensor."""
    plain = _plain(tensor)
    dense = plain if plain.is_contiguous() else _dense(plain)
    data = dense.reshape(-1).view(torch.uint8).numpy().data
    return tuple(plain.shape), plain.stride(), plain.dtype, xxhash.xxh3_128_digest(data)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The storage of a permuted tensor in its own order, without a copy where it has no holes."""
    if torch._debug_has_internal_overlap(tensor) == 0 and torch._prims_common.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()
