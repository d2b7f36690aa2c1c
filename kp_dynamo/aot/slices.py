"""The checked `chips`, `mesh` and `sharding` of `aot_compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kp_dynamo.aot.topologies import Topology, topology_of
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.mesh import DATA, NamedMesh


@dataclass(frozen=True)
class Slice:
    """Several chips, their mesh, and how a model lies on them."""

    topology: Topology
    mesh: NamedMesh
    sharding: Any


def slice_of(target: str, chips: int | str | None, mesh: Any, sharding: Any) -> Slice | None:
    """The slice to compile for; None for one chip.

    Args:
        target: The generation.
        chips: A number of chips or a shape, such as "4x4".
        mesh: Names and sizes of axes, whose product is the number of chips. None: all chips along "data".
        sharding: How the parameters lie on the mesh.

    Raises:
        TPUConfigurationError: The slice is not sold, the mesh is not all of its chips, or an argument is missing.
    """
    if chips is None:
        given = f"mesh={mesh}" if mesh is not None else f"sharding={sharding!r}"
        if mesh is not None or sharding is not None:
            raise TPUConfigurationError(f"{given} needs chips, such as chips=16.")
        return None
    topology = topology_of(target, chips)
    if topology.num_chips > 1 and target == "v7":
        raise TPUConfigurationError(
            f"chips={chips!r} is unsupported for target='v7': its devices are cores, of which a chip has two. Allowed: "
            "one chip. Try: another target."
        )
    named = NamedMesh.of({DATA: topology.num_chips} if mesh is None else mesh)
    _require_all_chips(named, topology)
    if topology.num_chips == 1:
        return None
    if sharding is None:
        raise TPUConfigurationError(
            f"chips={chips!r} needs a sharding. Allowed: 'data', 'fsdp', 'tensor', 'fsdp+tensor', or a dict."
        )
    return Slice(topology, named, dict(sharding) if isinstance(sharding, Mapping) else sharding)


def _require_all_chips(mesh: NamedMesh, topology: Topology) -> None:
    if mesh.num_devices != topology.num_chips:
        raise TPUConfigurationError(
            f"mesh={mesh} is invalid: it has {mesh.num_devices} places, but {topology.target} {topology} has "
            f"{topology.num_chips} chips. Allowed: sizes whose product is {topology.num_chips}."
        )
