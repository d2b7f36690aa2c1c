"""Keep copies on the XLA device of the CPU tensors that are used repeatedly.

A parameter is copied once, and again only after its *bytes* have changed. Version counters do not detect that: they do
not change for `p.data.add_()`, `p.data = t`, a numpy write or a fused optimizer.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils.weak import WeakIdKeyDictionary

from kp_dynamo.cache.tensor_bytes import tensor_bytes
from kp_dynamo.compat import xla

logger = logging.getLogger(__name__)


class _Copy(NamedTuple):
    digest: tuple[object, ...]
    on_device: torch.Tensor


class Placement:
    """Caches XLA copies of CPU tensors that are used repeatedly: parameters, buffers, repeated inputs.

    At its first use, a tensor that is not a parameter is passed on without a copy, and the program transfers it: most
    inputs are used once. An entry dies with its CPU tensor. Thread-safe.
    """

    def __init__(self) -> None:
        self._copies: Any = WeakIdKeyDictionary()
        self._seen: Any = WeakIdKeyDictionary()
        self._lock = threading.Lock()
        self._has_logged = False

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A program argument with the bytes of `tensor`: a copy on the device, or `tensor` itself."""
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
        self._log_once(tensor)
        return copy.on_device

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """A program argument whose buffer is donated: never a cached copy."""
        if tensor.device.type == "xla":
            return tensor
        with self._lock:
            self._copies.pop(tensor, None)  # the caller is about to overwrite the tensor
            return _plain(tensor)

    def clear(self) -> None:
        """Drop all copies."""
        with self._lock:
            self._copies.clear()
            self._seen.clear()

    def _log_once(self, tensor: torch.Tensor) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.info(
                "CPU tensors are copied to %s: parameters and reused inputs when their bytes change, new inputs and "
                "results at every call. To avoid this, move model and inputs there once: model.to('xla').",
                xla.device(),
            )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor detached from autograd, with pending conjugation and negation resolved."""
    return tensor.detach().resolve_conj().resolve_neg()


def digest_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Shape, strides, dtype and a 128-bit hash (XXH3) of the bytes of a dense CPU tensor."""
    plain = _plain(tensor)
    dense = plain if plain.is_contiguous() else _dense(plain)
    data = tensor_bytes(dense).numpy().data
    return tuple(plain.shape), plain.stride(), plain.dtype, xxhash.xxh3_128_digest(data)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in storage order, without a copy if it has no holes; otherwise a contiguous copy."""
    if torch._debug_has_internal_overlap(tensor) == 0 and torch._prims_common.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous()
