"""Checks arguments that overlap in memory when a graph writes to one of them.

AOTAutograd compiles for the overlap of CPU tensors at the first call, and guards it for no backend; it does not see the
overlap of XLA tensors. A call with a different overlap would read stale values, so it is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kp_dynamo.exceptions import TPUValidationError

Pairs = dict[tuple[int, int], tuple[int, int] | None]
"""Two positions -> the byte offsets at which their tensors begin, which AOTAutograd also compiles for.

None if both are the same tensor, and if an offset depends on a size.
"""


class _Place(NamedTuple):
    """The bytes of its storage that a tensor covers: from `start` up to `end`."""

    start: int
    end: int


class OverlapCheck:
    """Compares the overlap of arguments in memory with the overlap that a graph was compiled for.

    Args:
        written: The arguments that the graph writes to.
        compiled_for: The pairs of arguments that overlapped at compile time, see `overlapping`.
    """

    def __init__(self, written: Sequence[int], compiled_for: Pairs) -> None:
        self._written, self._compiled_for = frozenset(written), compiled_for

    def require_same(self, args: Sequence[Any]) -> None:
        """Raise if the arguments of a call overlap differently.

        Raises:
            TPUValidationError: They overlap differently.
        """
        found, known = overlapping(args, self._written), self._compiled_for
        if found.keys() == known.keys() and all(known[p] in (None, begins) for p, begins in found.items()):
            return
        first, second = pair = min(p for p in found | known if p not in known or known[p] not in (None, found.get(p)))
        given, other = "overlap", "do not"
        if pair in known:
            given, other = (
                (given, "overlap at other offsets in their storage") if pair in found else ("do not overlap", "do")
            )
        raise TPUValidationError(
            f"inputs {first} and {second} of a compiled graph (shapes {tuple(args[first].shape)} and "
            f"{tuple(args[second].shape)}) {given} in memory. The graph writes to one of them and is compiled "
            f"for inputs that {other}. Try: pass the base tensor and take the views inside the compiled function, or "
            "pass a copy."
        )


def overlap_check(metadata: Any, inputs: Sequence[Any], fakes: Sequence[Any]) -> OverlapCheck | None:
    """The check for a graph that is compiled for `inputs`; None if the graph writes to none of them.

    Args:
        metadata: AOTAutograd's metadata of the graph.
        inputs: CPU tensors; XLA tensors are replaced by CPU fake tensors, which never share memory.
        fakes: The fake tensors that Dynamo captured for them; their storage offset may depend on a size.
    """
    if metadata is None:
        return None
    written = [i for i, info in enumerate(metadata.input_info) if info.mutates_data]
    if len(metadata.input_info) != len(inputs):  # AOTAutograd has merged overlapping inputs
        written = list(range(len(inputs))) if written else []
    if not written:
        return None
    varying = {i for i, fake in enumerate(fakes) if _has_symbolic_offset(fake)}
    found = overlapping(inputs, frozenset(written))
    return OverlapCheck(written, {p: None if varying.intersection(p) else begins for p, begins in found.items()})


def _has_symbolic_offset(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and isinstance(fake.storage_offset(), torch.SymInt)


def overlapping(args: Sequence[Any], written: frozenset[int]) -> Pairs:
    """The pairs of positions whose tensors share bytes, with a write to at least one of the two."""
    groups: dict[int, list[int]] = defaultdict(list)
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            groups[value.untyped_storage()._cdata].append(position)
    shared = [group for group in groups.values() if len(group) > 1 and not written.isdisjoint(group)]
    return {pair: begins for group in shared for pair, begins in _pairs(args, group, written)}


def _pairs(
    args: Sequence[Any], group: list[int], written: frozenset[int]
) -> list[tuple[tuple[int, int], tuple[int, int] | None]]:
    places = sorted((_place(args[position]), position) for position in group)
    found = []
    for number, (place, position) in enumerate(places):
        for other, other_position in places[number + 1 :]:
            if other.start >= place.end:
                break
            if position in written or other_position in written:
                first, second = sorted([(position, place.start), (other_position, other.start)])
                is_one = args[position] is args[other_position]
                found.append(((first[0], second[0]), None if is_one else (first[1], second[1])))
    return found


def _place(tensor: torch.Tensor) -> _Place:
    like = tensor if tensor.device.type != "xla" else _as_strided(tensor)
    if not like.numel():
        return _Place(0, 0)
    reach = sum((size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True))
    start = int(like.storage_offset()) * like.element_size()
    return _Place(start, start + (int(reach) + 1) * like.element_size())


def _as_strided(tensor: torch.Tensor) -> torch.Tensor:
    """An XLA tensor's view of its base, replayed on the meta device: XLA tensors have no strides."""
    base = tensor._base
    if base is None:
        return tensor
    return tensor._view_func_unsafe(torch.empty(base.shape, dtype=base.dtype, device="meta"))  # type: ignore[no-any-return]
