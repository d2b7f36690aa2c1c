"""The checked `chips`, `mesh` and `sharding` of `aot_compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kp_dynamo.aot.topologies import Topology, topology_of
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.mesh import DATA, NamedMesh
from kp_dynamo.sharding.rules import check_sharding


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
        mesh: Names and sizes of axes, whose product is the number of devices: of chips, and on v7 twice as many. None:
            all along "data".
        sharding: How the parameters lie on the mesh.

    Raises:
        TPUConfigurationError: The slice is not sold, the mesh is not all of its devices, or an argument is missing.
    """
    if chips is None:
        given = f"mesh={mesh}" if mesh is not None else f"sharding={sharding!r}"
        if mesh is not None or sharding is not None:
            raise TPUConfigurationError(f"{given} needs chips, such as chips=16.")
        return None
    topology = topology_of(target, chips)
    named = NamedMesh.of({DATA: topology.num_devices} if mesh is None else mesh)
    _require_all_devices(named, topology)
    if sharding is not None:
        check_sharding(sharding)
    if topology.num_devices == 1:
        return None
    if sharding is None:
        raise TPUConfigurationError(
            f"chips={chips!r} needs a sharding. Allowed: 'data', 'fsdp', 'tensor', 'fsdp+tensor', or a dict."
        )
    return Slice(topology, named, dict(sharding) if isinstance(sharding, Mapping) else sharding)


def _require_all_devices(mesh: NamedMesh, topology: Topology) -> None:
    if mesh.num_devices == topology.num_devices:
        return
    per_chip = topology.devices_per_chip
    devices = "" if per_chip == 1 else f" with {per_chip} devices each"
    missing = mesh.num_devices * per_chip == topology.num_devices  # a mesh of chips, which other targets take
    advice = f" Try: {_with_devices(mesh, per_chip)}." if missing else ""
    raise TPUConfigurationError(
        f"mesh={mesh} is invalid: it has {mesh.num_devices} places, but {topology.target} {topology} has "
        f"{topology.num_chips} chips{devices}. Allowed: sizes whose product is {topology.num_devices}.{advice}"
    )


def _with_devices(mesh: NamedMesh, per_chip: int) -> str:
    """The mesh with the devices of each chip along its last axis, where they are neighbours."""
    return str(NamedMesh(mesh.names, (*mesh.sizes[:-1], mesh.sizes[-1] * per_chip)))
