"""The groups of devices that a collective of scheduled HLO joins, in any of XLA's four notations.

    replica_groups={{0,1},{2,3}}                       listed
    replica_groups=[2,2]<=[2,2]T(1,0)                  numbers in row-major order of [2,2], transposed, cut into rows
    replica_groups=mesh['x'=2,'y'=4] {'x','y':(1)2}    a mesh, and its axes along which a group extends
    source_target_pairs={{0,1},{1,0}}                  of a collective-permute

`'y':(1)2` is a part of an axis: its places are in row-major order of [1, 2, 2], and a group extends along the middle. A
mesh that does not number its devices in order says so: `mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'x'}`, or
`device_ids=(0,2,1,3)`.
Source: `MeshAxesReplicaGroupList::ToString` and `Mesh::ToString` of XLA.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod

Groups = tuple[tuple[int, ...], ...]

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_PART = re.compile(r"(.*):\((\d+)\)(\d+)")


def groups_of(attributes: str, num_devices: int) -> Groups:
    """The devices of each group, or the pairs of source and target. No group is one of all devices.

    Args:
        attributes: The attributes of the instruction.
        num_devices: The devices of the program.
    """
    if found := _MESH.search(attributes):
        return _of_mesh(*found.groups(default=""))
    if found := _IOTA.search(attributes):
        sizes, dims, order = (_numbers(part) for part in found.groups(default=""))
        flat = _transposed(dims, order)
        size = sizes[-1] if len(sizes) > 1 else len(flat)
        return tuple(tuple(flat[i : i + size]) for i in range(0, len(flat), size))
    found = _PAIRS.search(attributes) or _LISTED.search(attributes)
    groups = tuple(_numbers(text) for text in re.findall(r"\{([\d,]+)\}", found[1])) if found else ()
    return groups or (tuple(range(num_devices)),)


def _of_mesh(axes: str, ids: str, along: str) -> Groups:
    """The groups of `mesh[axes], device_ids=(ids) {along}`."""
    sizes = {name: int(size) for name, _, size in (axis.rpartition("=") for axis in axes.split(","))}
    parts = [_part(text, sizes) for text in along.split(",") if text]
    dims: list[int] = []
    grouped: dict[tuple[str, int], int] = {}  # the dimension of each part
    for name, size in sizes.items():
        done = 1
        for before, count in sorted((before, count) for of, before, count in parts if of == name):
            dims.append(before // done)
            grouped[name, before] = len(dims)
            dims.append(count)
            done = before * count
        dims.append(size // done)
    inside = [grouped[name, before] for name, before, _ in parts]
    outside = [i for i in range(len(dims)) if i not in inside]
    flat, devices = _transposed(dims, [*outside, *inside]), _device_ids(ids, prod(dims))
    size = prod(dims[i] for i in inside)
    return tuple(tuple(devices[at] for at in flat[i : i + size]) for i in range(0, len(flat), size))


def _part(text: str, sizes: dict[str, int]) -> tuple[str, int, int]:
    """An axis or a part of one: its name, the product of the sizes before the part, and its size."""
    found = _PART.fullmatch(text)
    return (found[1], int(found[2]), int(found[3])) if found else (text, 1, sizes[text])


def _device_ids(text: str, count: int) -> Sequence[int]:
    """The devices of a mesh in row-major order."""
    if found := _ORDER.fullmatch(text):
        return _transposed(_numbers(found[1]), _numbers(found[2] or ""))
    return _numbers(text) or range(count)


def _transposed(dims: Sequence[int], order: Sequence[int]) -> list[int]:
    """Numbers in row-major order of `dims`, transposed to `order`; () is no transpose."""
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    order = order or range(len(dims))
    places = product(*(range(dims[i]) for i in order))
    return [sum(strides[i] * at for i, at in zip(order, place, strict=True)) for place in places]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
