"""How a tensor lies on a mesh: along which axes each of its dimensions is divided, and how XLA writes that.

XLA divides a dimension of size n among k devices into shards of ceil(n / k), and pads the last ones. A tensor that is
divided along some axes only has a copy on each device of the other axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations, product
from math import prod

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.mesh import NamedMesh

Axes = str | tuple[str, ...] | None
"""What divides a dimension: one axis of the mesh, several (the first is the outermost), or None."""

Placement = tuple[Axes, ...]
"""What divides each dimension of a tensor. Shorter than the tensor's rank: the remaining dimensions are whole."""

REPLICATED = "{replicated}"
"""XLA's text for a tensor that is whole on every device."""

MOST_DIMS = 5
"""torch_xla 2.9 cannot divide a tensor of more dimensions over several devices."""


def axes_of(axes: Axes) -> tuple[str, ...]:
    """The axes that divide one dimension, as a tuple."""
    return (axes,) if isinstance(axes, str) else axes or ()


def check_placement(placement: Placement, mesh: NamedMesh, rank: int) -> None:
    """Raise unless a tensor of this rank can lie so on the mesh.

    Raises:
        TPUConfigurationError: The mesh lacks an axis, an axis occurs twice, or the tensor has too few dimensions.
    """
    used = [axis for axes in placement for axis in axes_of(axes)]
    for axis in used:
        mesh.size(axis)
    if len(set(used)) < len(used):
        raise TPUConfigurationError(
            f"placement={placement} is invalid: it uses an axis of the mesh twice. Allowed: each axis once a tensor."
        )
    if len(placement) > rank:
        raise TPUConfigurationError(
            f"placement={placement} is invalid for a tensor of {rank} dimensions. Allowed: at most one entry a "
            "dimension."
        )


def counts(placement: Placement, mesh: NamedMesh, rank: int) -> tuple[int, ...]:
    """Into how many shards each of `rank` dimensions is divided."""
    check_placement(placement, mesh, rank)
    padded = (*placement, *[None] * (rank - len(placement)))
    return tuple(prod(mesh.size(axis) for axis in axes_of(axes)) for axes in padded)


def shard_shape(shape: Sequence[int], placement: Placement, mesh: NamedMesh) -> tuple[int, ...]:
    """The shape of the part that each device holds, padding included."""
    return tuple(-(-size // count) for size, count in zip(shape, counts(placement, mesh, len(shape)), strict=True))


def is_whole(placement: Placement, mesh: NamedMesh) -> bool:
    """Whether every device holds the whole tensor. An axis of size 1 divides nothing."""
    return prod(counts(placement, mesh, len(placement))) == 1


def hlo_sharding(placement: Placement, mesh: NamedMesh, rank: int) -> str:
    """XLA's text of a placement, as in the attribute `mhlo.sharding`.

    `("data", None)` on `{"data": 2, "model": 2}` is `{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}`: two shards of
    dimension 0, each on two devices. The devices are listed shard by shard, the last dimension's shards fastest; those
    with a copy of the same shard are in ascending order, as torch_xla has them.
    """
    tiles = counts(placement, mesh, rank)
    if prod(tiles) == 1:
        return REPLICATED
    used = [axis for axes in placement for axis in axes_of(axes)]
    copies = [axis for axis in mesh.names if axis not in used]
    num_copies = prod(map(mesh.size, copies))
    in_order = mesh.devices_along([*used, *copies])
    groups = [sorted(in_order[i : i + num_copies]) for i in range(0, len(in_order), num_copies)]
    devices = ",".join(str(device) for group in groups for device in group)
    dims = ",".join(map(str, tiles if num_copies == 1 else (*tiles, num_copies)))
    return f"{{devices=[{dims}]{devices}{'' if num_copies == 1 else ' last_tile_dim_replicate'}}}"


def placement_of(text: str, mesh: NamedMesh, rank: int) -> Placement | None:
    """The placement of a tensor of this rank that XLA writes so; None if it is none of this mesh."""
    return (None,) * rank if text == REPLICATED else _by_text(mesh, rank).get(text)


@cache
def _by_text(mesh: NamedMesh, rank: int) -> dict[str, Placement]:
    """Every placement of a tensor of this rank, by XLA's text."""
    axes = [name for name in mesh.names if mesh.size(name) > 1]
    found: dict[str, Placement] = {}
    for order, dims in product(permutations(axes), product(range(rank + 1), repeat=len(axes))):
        along = [tuple(axis for axis, dim in zip(order, dims, strict=True) if dim == i) for i in range(rank)]
        placement = tuple(names[0] if len(names) == 1 else names or None for names in along)
        found.setdefault(hlo_sharding(placement, mesh, rank), placement)
    return found
