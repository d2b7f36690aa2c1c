"""The collectives of a scheduled program: which instructions they are, their bytes, and the devices of each group.

The TPU compiler (libtpu 0.0.21, and for v7 0.0.51) writes a collective as

1. one instruction: `all-reduce(...)`;
2. a pair: `collective-permute-start(...)` and `collective-permute-done(...)`;
3. fusions of one chain, whose collectives have the same channel: the first holds a custom call "AsyncCollectiveStart",
   the last one "AsyncCollectiveDone", and those between them compute while the collective goes on;
4. a fusion of an all-reduce and a dynamic-slice, `kind=kCustom, calls=%all-reduce-scatter`: a reduce-scatter;
5. on v7, a program of the SparseCores, which run it beside the computing core: `async-start`, whose computation holds
   the collective; `async-update`, which hands its operands over, so that it can begin; and `async-done`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kp_dynamo.aot.hlo import Instruction, Module
from kp_dynamo.aot.links import Kind, Links
from kp_dynamo.aot.replica_groups import Groups, groups_of
from kp_dynamo.sharding.mesh import NamedMesh

_KINDS: tuple[Kind, ...] = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_START, _END = "AsyncCollectiveStart", "AsyncCollectiveDone"
_ASYNC = ("async-start", "async-update", "async-done")


@dataclass(frozen=True)
class Collective:
    """One collective of a schedule.

    Attributes:
        kind: The kind of collective.
        num_bytes: Bytes of an all-gather's result, else of the operands, on one device.
        groups: The devices of each group; for a collective-permute, pairs of source and target.
    """

    kind: Kind
    num_bytes: int
    groups: Groups

    def axes(self, mesh: NamedMesh) -> str:
        """The axes of the mesh along which the devices of a group differ, such as "data" or "data+model"."""
        order = {device: position for position, device in enumerate(mesh.device_ids)}
        found: set[int] = set()
        for group in self.groups:
            places = zip(*(_place(order[device], mesh.sizes) for device in group), strict=True)
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

    def __init__(self, module: Module, num_devices: int) -> None:
        self._module, self._num_devices = module, num_devices

    def read(self, op: Instruction, body: Sequence[Instruction]) -> Part | None:
        """What an instruction of `body` does to a collective; None if it has nothing to do with one."""
        if op.opcode.removesuffix("-done") in _KINDS and op.opcode.endswith("-done"):
            return Part("end", op.operands[0], None)
        if op.opcode in _ASYNC:
            return self._part_of_chain(op, body)
        if (kind := _kind_of(op)) is not None:
            return Part("start" if op.opcode.endswith("-start") else "run", op.name, self._collective(kind, op, body))
        if op.opcode != "fusion":
            return None
        around = self._module.computations.get(op.called("calls"), [])
        return next((self._part(op, i, around) for i in around if _kind_of(i) is not None), None)

    def _part_of_chain(self, op: Instruction, body: Sequence[Instruction]) -> Part | None:
        """The part of an `async-start`, `async-update` or `async-done`."""
        first = first_of_chain(op, body)
        found = offloaded(self._module, first)
        if found is None:
            return None
        if op.opcode == "async-done":
            return Part("end", first.name, None)
        # A start without operands only launches the program, which waits for the update that has them.
        begins = op is first if first.operands else op.operands[:1] == (first.name,)
        if not begins:
            return None
        inner, around = found
        kind = _kind_of(inner)
        assert kind is not None
        return Part("start", first.name, self._collective(kind, inner, around))

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
        groups = groups_of(op.attributes, self._num_devices)
        return Collective(kind, operands * len(groups[0]) if kind == "all-gather" else operands, groups)


def first_of_chain(op: Instruction, body: Sequence[Instruction]) -> Instruction:
    """The `async-start` of an `async-update` or `async-done` in `body`."""
    by_name = {i.name: i for i in body}
    while op.opcode in _ASYNC and op.opcode != "async-start":
        op = by_name[op.operands[0]]
    return op


def offloaded(module: Module, start: Instruction) -> tuple[Instruction, Sequence[Instruction]] | None:
    """The collective that an `async-start` runs, and the instructions around it; None if it runs something else."""
    bodies = _called_by(module, start)
    return next(((i, body) for body in bodies for i in body if _kind_of(i) is not None), None)


def _called_by(module: Module, op: Instruction) -> Iterator[Sequence[Instruction]]:
    """The computations that an instruction calls, and those that they call."""
    for role in ("calls", "called_computations"):
        body = module.computations.get(op.called(role), ())
        yield body
        for inner in body:
            yield from _called_by(module, inner)


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


def _place(position: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place of the device at a position of a mesh, in row-major order."""
    found = []
    for size in reversed(sizes):
        position, at = divmod(position, size)
        found.append(at)
    return tuple(reversed(found))
