"""Give results on the CPU the strides and the shared storages that they have in eager.

A program returns the pieces of one tensor (`unbind`, `chunk`) separately, and a padded result is sliced to a dense
copy. Dynamo's fake tensors give eager's layout: strides, storage offsets, and which results share a storage.

Results on XLA that share a storage are views of their base already, but for those of an `autograd.Function`
(`autograd/function_views.py`). They become views of one tensor here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from kp_dynamo.cache.lru import LRUCache
from kp_dynamo.graph.symbol_values import SymbolReader, Values, evaluated
from kp_dynamo.runtime.storage_places import Base, StoragePlace, overlap

_MAX_LAYOUTS = 4096  # a few hundred bytes each


class ResultMemory:
    """Gives the results of a graph eager's memory layout.

    Args:
        gm: Dynamo's graph.
        eager: Fake tensors of its results; see `eager_strides.eager_results`.
        lays_out_all: Whether to include results that share no memory; needed if results are sliced to true sizes.
    """

    def __init__(self, gm: fx.GraphModule, eager: Sequence[Any], *, lays_out_all: bool) -> None:
        given = [n.meta.get("example_value") for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
        inputs = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")]
        self._reader, self._eager = SymbolReader(inputs), eager
        groups: dict[int, list[int]] = defaultdict(list)
        for position, value in enumerate(eager):
            if _is_strided(value):
                groups[_storage(value)].append(position)
        for value in filter(_is_strided, given):
            groups.pop(_storage(value), None)  # AOTAutograd makes views of inputs from the inputs
        least = 1 if lays_out_all else 2
        self._groups = [g for g in groups.values() if len(g) >= least and len({eager[p].dtype for p in g}) == 1]
        self._layouts: LRUCache[tuple[Any, ...], list[list[StoragePlace] | None]] = LRUCache(_MAX_LAYOUTS)

    @property
    def is_needed(self) -> bool:
        """Whether `around` changes results."""
        return bool(self._groups)

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, with its results in eager's layout."""
        if not self.is_needed:
            return run

        def called(*args: Any) -> list[Any]:
            layouts = self._layouts_for(self._reader.read(args))
            results = list(run(*args))
            for group, places in zip(self._groups, layouts, strict=True):
                if places is not None:
                    _lay_out(results, group, places)
            return results

        return called

    def _layouts_for(self, values: Values) -> list[list[StoragePlace] | None]:
        key = tuple(values.values())
        found = self._layouts.get(key)
        if found is None:
            found = [_places([self._eager[position] for position in group], values) for group in self._groups]
            self._layouts.set(key, found)
        return found


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _places(tensors: Sequence[torch.Tensor], values: Values) -> list[StoragePlace] | None:
    """The places of tensors in their storage; None if they do not follow from the arguments."""
    try:
        found = [
            StoragePlace(
                tuple(evaluated(size, values) for size in tensor.shape),
                tuple(evaluated(step, values) for step in tensor.stride()),
                evaluated(tensor.storage_offset(), values),
            )
            for tensor in tensors
        ]
    except KeyError:
        return None
    # A result that shares no storage starts at offset 0.
    return found if len(found) > 1 else [StoragePlace(found[0].shape, found[0].stride, 0)]


def _lay_out(results: list[Any], group: Sequence[int], places: Sequence[StoragePlace]) -> None:
    """Copy results that share a storage in eager into one storage, unless they already share one."""
    tensors = [results[position] for position in group]
    if not _can_share(tensors, places) or _is_right(tensors, places):
        return
    if any(t.requires_grad and t._is_view() for t in tensors):
        return  # autograd already tracks them as views of each other
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        laid: Sequence[torch.Tensor] = _SharedStorage.apply(places, *tensors)  # type: ignore[no-untyped-call]
    else:
        laid = _copied(tensors, places)
    for position, tensor in zip(group, laid, strict=True):
        results[position] = tensor


def _can_share(tensors: Sequence[Any], places: Sequence[StoragePlace]) -> bool:
    if not all(_fits(tensor, place) for tensor, place in zip(tensors, places, strict=True)):
        return False
    return _are_on(tensors, "cpu") or (_are_on(tensors, "xla") and overlap(places) and Base.of(places) is not None)


def _are_on(tensors: Sequence[torch.Tensor], device: str) -> bool:
    return all(tensor.device.type == device for tensor in tensors)


def _fits(tensor: Any, place: StoragePlace) -> bool:
    return _is_strided(tensor) and tuple(tensor.shape) == place.shape


def _is_right(tensors: Sequence[torch.Tensor], places: Sequence[StoragePlace]) -> bool:
    is_shared = len({_storage(t) for t in tensors}) == 1
    if _are_on(tensors, "xla"):  # without strides
        return is_shared
    starts = {t.storage_offset() - place.offset for t, place in zip(tensors, places, strict=True)}
    return is_shared and len(starts) == 1 and all(place.holds(t) for t, place in zip(tensors, places, strict=True))


def _copied(tensors: Sequence[torch.Tensor], places: Sequence[StoragePlace]) -> list[torch.Tensor]:
    """Copies of tensors in one shared storage, at their places."""
    if _are_on(tensors, "xla") and (base := Base.of(places)) is not None:
        return base.views_in_copy_of(tensors, places)
    memory = torch.empty(max(place.end for place in places), dtype=tensors[0].dtype, device="cpu")
    laid = [memory.as_strided(place.shape, place.stride, place.offset) for place in places]
    for view, tensor in zip(laid, tensors, strict=True):
        _write(view, tensor.detach(), memory)
    return laid


def _write(view: torch.Tensor, tensor: torch.Tensor, memory: torch.Tensor) -> None:
    if 0 in view.stride() or torch._debug_has_internal_overlap(view) != 0:
        # Elements that share a storage index have equal values.
        where = torch.arange(memory.numel(), device="cpu").as_strided(view.shape, view.stride(), view.storage_offset())
        memory[where] = tensor
    else:
        view.copy_(tensor)


class _SharedStorage(torch.autograd.Function):
    """`_copied` with a backward that passes on the gradients of the copies."""

    @staticmethod
    def forward(ctx: Any, places: Sequence[StoragePlace], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        laid = tuple(_copied(tensors, places))
        ctx.mark_non_differentiable(*(view for view, t in zip(laid, tensors, strict=True) if not t.requires_grad))
        return laid

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *gradients
