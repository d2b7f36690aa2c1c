"""The collectives of a scheduled program: which instructions they are, their bytes, and the chips of each group.

The TPU compiler (libtpu 0.0.21) writes a collective as

1. one instruction: `all-reduce(...)`;
2. a pair: `collective-permute-start(...)` and `collective-permute-done(...)`;
3. fusions of one chain, whose collectives have the same channel: the first holds a custom call "AsyncCollectiveStart",
   the last one "AsyncCollectiveDone", and those between them compute while the collective goes on;
4. a fusion of an all-reduce and a dynamic-slice, `kind=kCustom, calls=%all-reduce-scatter`: a reduce-scatter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from kp_dynamo.aot.hlo import Instruction, Module
from kp_dynamo.aot.links import Kind, Links
from kp_dynamo.sharding.mesh import NamedMesh

_KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_START, _END = "AsyncCollectiveStart", "AsyncCollectiveDone"
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True)
class Collective:
    """One collective of a schedule.

    Attributes:
        kind: The kind of collective.
        num_bytes: Bytes of an all-gather's result, else of the operands, on one chip.
        groups: The chips of each group; for a collective-permute, pairs of source and target.
    """

    kind: Kind
    num_bytes: int
    groups: tuple[tuple[int, ...], ...]

    def axes(self, mesh: NamedMesh) -> str:
        """The axes of the mesh along which the chips of a group differ, such as "data" or "data+model"."""
        order = {device: position for position, device in enumerate(mesh.device_ids)}
        found: set[int] = set()
        for group in self.groups:
            places = zip(*(_place(order[chip], mesh.sizes) for chip in group), strict=True)
            found |= {axis for axis, values in enumerate(places) if len(set(values)) > 1}
        return "+".join(name for axis, name in enumerate(mesh.names) if axis in found) or "none"

    def seconds(self, links: Links) -> float:
        """Its time on the links, without other traffic."""
        if self.kind == "collective-permute":
            return links.permute_seconds(self.num_bytes, ((group[0], group[1]) for group in self.groups))
        return links.seconds(self.kind, self.num_bytes, self.groups)


@dataclass(frozen=True)
class Part:
    """What an instruction does to a collective.

    Attributes:
        role: It runs the whole collective, starts it, computes while it goes on, or waits for its end.
        key: The same for the parts of one collective.
        collective: The collective; None for an end that does not say it.
    """

    role: Literal["run", "start", "middle", "end"]
    key: str
    collective: Collective | None


class CollectiveReader:
    """Finds the collectives of a module."""

    def __init__(self, module: Module, num_chips: int) -> None:
        self._module, self._num_chips = module, num_chips

    def read(self, op: Instruction, body: Sequence[Instruction]) -> Part | None:
        """What an instruction of `body` does to a collective; None if it has nothing to do with one."""
        if op.opcode.removesuffix("-done") in _KINDS and op.opcode.endswith("-done"):
            return Part("end", op.operands[0], None)
        if (kind := _kind_of(op)) is not None:
            return Part("start" if op.opcode.endswith("-start") else "run", op.name, self._collective(kind, op, body))
        if op.opcode != "fusion":
            return None
        around = self._module.computations.get(op.called("calls"), [])
        return next((self._part(op, i, around) for i in around if _kind_of(i) is not None), None)

    def _part(self, op: Instruction, inner: Instruction, around: Sequence[Instruction]) -> Part:
        """The part of a fusion with the instructions `around`, of which `inner` is the collective."""
        kind = _kind_of(inner)
        assert kind is not None
        if kind == "all-reduce" and any(i.opcode == "dynamic-slice" for i in around):
            kind = "reduce-scatter"
        found = self._collective(kind, inner, around)
        targets = {i.attribute("custom_call_target") for i in around if i.opcode == "custom-call"}
        channel = f"channel {inner.attribute('channel_id')}"
        if _START in targets:
            return Part("start", channel, found)
        if _END in targets:
            return Part("end", channel, found)
        return Part("middle", channel, found) if _is_middle(inner) else Part("run", op.name, found)

    def _collective(self, kind: Kind, op: Instruction, body: Sequence[Instruction]) -> Collective:
        shapes = {i.name: i.shape for i in body}
        operands = sum(shapes[operand].num_bytes for operand in op.operands if operand in shapes)
        groups = _groups(op.attributes, self._num_chips)
        return Collective(kind, operands * len(groups[0]) if kind == "all-gather" else operands, groups)


def is_communication(module: Module, op: Instruction) -> bool:
    """Whether an instruction only runs, starts or ends a collective."""
    if op.opcode == "fusion":
        inside = module.computations.get(op.called("calls"), [])
        found = [i for i in inside if _kind_of(i) is not None]
        is_end = any(i.attribute("custom_call_target") in (_START, _END) for i in inside)
        return bool(found) and (is_end or not any(map(_is_middle, found)))
    return op.opcode.removesuffix("-done").removesuffix("-start") in _KINDS


def is_end(module: Module, op: Instruction) -> bool:
    """Whether an instruction ends a collective that another one started."""
    inside = module.computations.get(op.called("calls"), []) if op.opcode == "fusion" else []
    return op.opcode.endswith("-done") or any(i.attribute("custom_call_target") == _END for i in inside)


def _is_middle(op: Instruction) -> bool:
    """Whether a collective inside a fusion goes on while the fusion computes."""
    return '"async_collective_fusion_config"' in op.attributes


def _kind_of(op: Instruction) -> Kind | None:
    return next((kind for kind in _KINDS if op.opcode in (kind, f"{kind}-start")), None)


def _groups(attributes: str, num_chips: int) -> tuple[tuple[int, ...], ...]:
    """The groups of chips, or the pairs of source and target."""
    if found := _IOTA.search(attributes):
        sizes, dims, order = (_numbers(part) if part else () for part in found.groups())
        return _iota(sizes, dims, order or tuple(range(len(dims))))
    found = _PAIRS.search(attributes) or _LISTED.search(attributes)
    groups = tuple(_numbers(text) for text in re.findall(r"\{([\d,]+)\}", found[1])) if found else ()
    return groups or (tuple(range(num_chips)),)


def _iota(sizes: Sequence[int], dims: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The groups of "[sizes]<=[dims]T(order)": numbers in row-major order of `dims`, transposed, and cut into rows."""
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    places = product(*(range(dims[i]) for i in order))
    flat = [sum(strides[i] * at for i, at in zip(order, place, strict=True)) for place in places]
    size = sizes[-1] if len(sizes) > 1 else len(flat)
    return tuple(tuple(flat[i : i + size]) for i in range(0, len(flat), size))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _place(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place of the device at a position of a mesh, in row-major order."""
    found = []
    for size in reversed(sizes):
        position, at = divmod(position, size)
        found.append(at)
    return tuple(reversed(found))
