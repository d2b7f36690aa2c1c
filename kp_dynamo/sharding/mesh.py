"""A mesh of devices with named axes: `{"data": 4, "model": 2}` is eight devices, in four rows of two.

The devices are in row-major order: the last axis varies fastest, so its devices are neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from kp_dynamo.exceptions import TPUConfigurationError

DATA = "data"
"""The axis that divides the batch, and the parameters of `"fsdp"`."""

MODEL = "model"
"""The axis that divides the matmuls of `"tensor"`."""

_MOST_DEVICES = 2 * 9216  # a pod of v7

_ALLOWED = "a dict of axis names to sizes >= 1, such as {'data': 4, 'model': 2}"


@dataclass(frozen=True)
class NamedMesh:
    """Devices in rows and columns, whose axes have names."""

    names: tuple[str, ...]
    """The name of each axis."""

    sizes: tuple[int, ...]
    """The number of devices along each axis."""

    device_ids: tuple[int, ...] = ()
    """The id of each device, in row-major order. Default: 0, 1, 2 and so on, in that order."""

    def __post_init__(self) -> None:
        given = dict(zip(self.names, self.sizes, strict=False))
        if len(self.names) != len(self.sizes) or len(given) != len(self.names):
            raise _invalid(f"{self.names} with sizes {self.sizes}", "names and sizes are not one unique pair an axis")
        if not self.names:
            raise _invalid("{}", "it has no axis")
        for name, size in given.items():
            if not isinstance(name, str) or not name:
                raise _invalid(given, f"the name of an axis is {name!r}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise _invalid(given, f"the size of {name!r} is {size!r}")
        if self.num_devices > _MOST_DEVICES:
            raise _invalid(given, f"no slice has more than {_MOST_DEVICES} devices")
        if not self.device_ids:
            object.__setattr__(self, "device_ids", tuple(range(self.num_devices)))
        if sorted(self.device_ids) != list(range(self.num_devices)):
            raise _invalid(given, f"device_ids={self.device_ids} are not the numbers 0 to {self.num_devices - 1}")

    @classmethod
    def of(cls, given: NamedMesh | Mapping[str, int]) -> NamedMesh:
        """From a dict of axis names to sizes; a NamedMesh is returned as it is."""
        if isinstance(given, NamedMesh):
            return given
        if not isinstance(given, Mapping):
            raise _invalid(repr(given), f"it is a {type(given).__name__}")
        return cls(tuple(given), tuple(given.values()))

    @classmethod
    def parse(cls, text: str) -> NamedMesh:
        """From the form of the command line, "data=4,model=2"."""
        pairs = [part.partition("=") for part in text.split(",")]
        names = [name.strip() for name, _, _ in pairs]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None or any(not size.strip().isdecimal() for _, _, size in pairs):
            why = f"the axis {repeated!r} occurs twice" if repeated else "a part is not name=number"
            raise TPUConfigurationError(f"mesh={text!r} is invalid: {why}. Allowed: such as data=4,model=2.")
        return cls(tuple(names), tuple(int(size) for _, _, size in pairs))

    @property
    def num_devices(self) -> int:
        """The product of the sizes."""
        return prod(self.sizes)

    def has(self, axis: str) -> bool:
        """Whether an axis has this name."""
        return axis in self.names

    def size(self, axis: str) -> int:
        """The number of devices along an axis.

        Raises:
            TPUConfigurationError: No axis has this name.
        """
        if axis not in self.names:
            raise TPUConfigurationError(
                f"mesh={self} has no axis {axis!r}. Allowed: {', '.join(map(repr, self.names))}. Try: add {axis!r} to "
                "the mesh, of size 1 if nothing is to be divided along it."
            )
        return self.sizes[self.names.index(axis)]

    def count(self, axis: str) -> int:
        """The number of devices along an axis; 1 if no axis has this name."""
        return self.size(axis) if self.has(axis) else 1

    @property
    def is_along_batch(self) -> bool:
        """Whether there are several devices, all along the batch: they divide weights for the memory only."""
        return self.count(DATA) == self.num_devices > 1

    def devices_along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ids of all devices, in row-major order of all axes in another order."""
        strides = {name: prod(self.sizes[i + 1 :]) for i, name in enumerate(self.names)}
        places = product(*(range(self.size(axis)) for axis in axes))
        return tuple(
            self.device_ids[sum(strides[axis] * i for axis, i in zip(axes, place, strict=True))] for place in places
        )

    def beginning_with(self, axis: str) -> NamedMesh:
        """The same devices at the same places, with this axis first. No such axis raises TPUConfigurationError."""
        self.size(axis)
        names = (axis, *(name for name in self.names if name != axis))
        return NamedMesh(names, tuple(map(self.size, names)), self.devices_along(names))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))


def _invalid(given: Any, why: str) -> TPUConfigurationError:
    return TPUConfigurationError(f"mesh={given} is invalid: {why}. Allowed: {_ALLOWED}.")
