"""Arguments that overlap in memory where a graph writes to one of them.

AOTAutograd compiles for the overlap of CPU tensors at the first call, and guards it with no backend; of XLA tensors it
sees none. A call with another overlap would read old values: it is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kp_dynamo.exceptions import TPUValidationError

Pairs = dict[tuple[int, int], tuple[int, int] | None]
"""Two positions -> the bytes at which their tensors begin, which AOTAutograd compiles for as well.

None for one tensor given twice, and where a size decides where it begins.
"""


class _Place(NamedTuple):
    """Where a tensor lies in its storage: bytes from `start` up to `end`."""

    start: int
    end: int


class OverlapCheck:
    """Compares the overlap of arguments in memory with the one that a graph was compiled for.

    Args:
        written: The arguments that the graph writes to.
        compiled_for: The pairs of arguments that overlapped then, see `overlapping`.
    """

    def __init__(self, written: Sequence[int], compiled_for: Pairs) -> None:
        self._written, self._compiled_for = frozenset(written), compiled_for

    def require_same(self, args: Sequence[Any]) -> None:
        """Raise where a call overlaps in another way.

        Raises:
            TPUValidationError: It does.
        """
        found, known = overlapping(args, self._written), self._compiled_for
        if found.keys() == known.keys() and all(known[p] in (None, begins) for p, begins in found.items()):
            return
        first, second = pair = min(p for p in found | known if p not in known or known[p] not in (None, found.get(p)))
        given, other = "overlap", "do not"
        if pair in known:
            given, other = (
                (given, "overlap at other places of their storage") if pair in found else ("do not overlap", "do")
            )
        raise TPUValidationError(
            f"inputs {first} and {second} of a compiled graph (shapes {tuple(args[first].shape)} and "
            f"{tuple(args[second].shape)}) {given} in memory, and the graph, which writes to one of them, is compiled "
            f"for inputs that {other}. Pass the base tensor and take the views inside the compiled function, or pass "
            "a copy."
        )


def overlap_check(metadata: Any, inputs: Sequence[Any], fakes: Sequence[Any]) -> OverlapCheck | None:
    """The check of a graph that is compiled for `inputs`; None for one that writes to none of them.

    Args:
        metadata: What AOTAutograd knows of the graph.
        inputs: CPU tensors; XLA tensors stand as CPU fake tensors, of which no two share memory.
        fakes: The same as Dynamo has captured them: where they begin may hang on a size.
    """
    if metadata is None:
        return None
    written = [i for i, info in enumerate(metadata.input_info) if info.mutates_data]
    if len(metadata.input_info) != len(inputs):  # of overlapping inputs AOTAutograd has made one
        written = list(range(len(inputs))) if written else []
    if not written:
        return None
    varying = {i for i, fake in enumerate(fakes) if _begins_anywhere(fake)}
    found = overlapping(inputs, frozenset(written))
    return OverlapCheck(written, {p: None if varying.intersection(p) else begins for p, begins in found.items()})


def _begins_anywhere(fake: Any) -> bool:
    return isinstance(fake, torch.Tensor) and isinstance(fake.storage_offset(), torch.SymInt)


def overlapping(args: Sequence[Any], written: frozenset[int]) -> Pairs:
    """The pairs of positions whose tensors share bytes, one of the two being written to."""
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
    """The view that an XLA tensor is of its base, of a base on the meta device: XLA tensors have no strides."""
    base = tensor._base
    if base is None:
        return tensor
    return tensor._view_func_unsafe(torch.empty(base.shape, dtype=base.dtype, device="meta"))  # type: ignore[no-any-return]
