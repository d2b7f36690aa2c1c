"""`SPMDConfig`: the mesh of the devices of a process, and what lies along its axes, for the object API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh
from kp_dynamo.sharding.rules import Sharding, check_sharding


@dataclass(frozen=True)
class SPMDConfig:
    """How models are divided over all devices of a process. It is checked here; the devices at the first use.

    Raises:
        TPUConfigurationError: A field is invalid.
    """

    mesh_shape: tuple[int, ...]
    """The number of devices along each axis. The first axis divides the batch: (8, 1) is eight parts of a batch."""

    axis_names: tuple[str, ...] = ()
    """The name of each axis, the first one "data". Default: ("data", "model"), as far as there are axes."""

    sharding: Sharding | None = None
    """What lies along the axes, as for `kp_dynamo.shard`. Default: None, every device holds all parameters."""

    def __post_init__(self) -> None:
        shape = _tuple("mesh_shape", self.mesh_shape, "a tuple of ints >= 1, such as (8, 1)")
        given = _tuple("axis_names", self.axis_names, "a tuple of names, such as ('data', 'model')")
        names = given or (DATA, MODEL)[: len(shape)]
        if len(names) != len(shape) or names[0] != DATA:
            raise TPUConfigurationError(
                f"SPMDConfig.axis_names={names} is invalid for mesh_shape={shape}. Allowed: one name for each of the "
                f"{len(shape)} axes, of which the first divides the batch and is {DATA!r}. Try: a first axis of size 1 "
                "if the batch is whole on every device."
            )
        NamedMesh(names, shape)  # raises what is wrong with single sizes and names
        if self.sharding is not None:
            check_sharding(self.sharding)
        object.__setattr__(self, "mesh_shape", shape)
        object.__setattr__(self, "axis_names", names)

    @property
    def mesh(self) -> NamedMesh:
        """The mesh with its names."""
        return NamedMesh(self.axis_names, self.mesh_shape)


def _tuple(field: str, value: Any, allowed: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or (field == "mesh_shape" and not value):
        raise TPUConfigurationError(f"SPMDConfig.{field}={value!r} is invalid. Allowed: {allowed}.")
    return tuple(value)
