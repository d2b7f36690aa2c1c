"""The slices that Google Cloud sells of each generation: their shapes, hosts and wrap-around links.

Sources, read in 2026:
* v5e, v6e: cloud.google.com/tpu/docs/v5e and /v6e, the table of supported 2D shapes.
* v5p: cloud.google.com/tpu/docs/v5p, the table of shapes ("most, but not all"), which has no row for 16 chips. The
  accelerator type v5p-32 on the same page (16 chips) is 2x2x4 in axlearn/common/aot_compilation.py.
* v4: cloud.google.com/tpu/docs/types-topologies: AxBxC with A <= B <= C, each at most 4 or a multiple of 4; a number
  of chips is the shape that is most like a cube.
* v7: cloud.google.com/tpu/docs/tpu7x, shapes of the TPU7x; the numbers in axlearn/common/aot_compilation.py. Its chip
  is two devices ("Dual-chiplet architecture" on that page); on all others, one.
* Wrap-around links: a v5e or v6e axis has them at its full length, 16 (jax-ml.github.io/scaling-book/tpus). On v4, v5p
  and v7, every axis has them if the slice is made of whole cubes of 4x4x4 (cloud.google.com/tpu/docs/v5p, "Important").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.hardware import CHIPS

_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS_OF_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 4
_FULL_AXIS = 16
_MOST_CHIPS = {"v4": 4096, "v5p": 6144, "v7": 9216}
_NUM_NEAREST = 3


@dataclass(frozen=True)
class Topology:
    """The chips of a slice, in a grid, and their devices.

    Attributes:
        target: The generation.
        shape: Chips along each axis of the grid, such as (4, 4).
        wraps: For each axis, whether a link joins its last chip to its first.
        chips_per_host: Chips of one machine: 8 on v5e and v6e (their virtual machines may have fewer), else 4.
        devices_per_chip: 2 on v7, else 1.
    """

    target: str
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    chips_per_host: int
    devices_per_chip: int = 1

    @property
    def num_chips(self) -> int:
        return prod(self.shape)

    @property
    def num_devices(self) -> int:
        """What a program runs on, and a mesh arranges."""
        return self.num_chips * self.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Machines; a slice smaller than a machine has one."""
        return -(-self.num_chips // self.chips_per_host)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """The place in the grid of a device's chip; chips are numbered in row-major order, and devices with them."""
        chip, found = self.chip_of(device), []
        for size in reversed(self.shape):
            chip, at = divmod(chip, size)
            found.append(at)
        return tuple(reversed(found))

    def chip_of(self, device: int) -> int:
        """The number of a device's chip: the devices of a chip are neighbours."""
        return device // self.devices_per_chip

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


def topology_of(target: str, chips: int | str) -> Topology:
    """The topology with this number of chips (the vendor's default shape), or with this shape, such as "4x4".

    Raises:
        TPUConfigurationError: The target does not come in that number or shape.
    """
    shape = _shape_given(target, chips)
    if isinstance(shape, int):
        found = [s for s in shapes_of(target) if prod(s) == shape]
        if not found:
            raise TPUConfigurationError(
                f"chips={chips} is invalid for target={target!r}: it is not sold. Nearest: {_nearest(target, shape)}."
            )
        shape = min(found, key=sum)  # the most like a cube
    elif shape not in shapes_of(target):
        raise TPUConfigurationError(
            f"chips={chips!r} is invalid for target={target!r}: the shape is not sold. Nearest: "
            f"{_nearest(target, prod(shape))}."
        )
    is_flat = len(shape) == len(_FLAT[0])
    is_cubes = all(size % _CUBE == 0 for size in shape)
    wraps = tuple(size == _FULL_AXIS if is_flat else is_cubes for size in shape)
    devices = CHIPS[target].num_devices
    return Topology(target, shape, wraps, chips_per_host=8 if is_flat else 4, devices_per_chip=devices)


def _shape_given(target: str, chips: int | str) -> int | tuple[int, ...]:
    if isinstance(chips, int) and not isinstance(chips, bool) and chips > 0:
        return chips
    text = chips.strip().lower() if isinstance(chips, str) else ""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", text):
        example = str(topology_of(target, 16))
        raise TPUConfigurationError(f"chips={chips!r} is invalid. Allowed: a number > 0, or a shape such as {example}.")
    return tuple(map(int, text.split("x")))


@cache
def shapes_of(target: str) -> tuple[tuple[int, ...], ...]:
    """All shapes of a generation, the smallest first."""
    if target in ("v5e", "v6e"):
        return _FLAT
    return (*_PARTS_OF_A_CUBE, *sorted(_cubes(_MOST_CHIPS[target]), key=lambda s: (prod(s), sum(s))))


def _cubes(most_chips: int) -> Iterator[tuple[int, int, int]]:
    """The shapes made of whole cubes, the axes in ascending order."""
    most = most_chips // _CUBE**3
    for a in range(1, most + 1):
        for b in range(a, most // a + 1):
            for c in range(b, most // (a * b) + 1):
                yield a * _CUBE, b * _CUBE, c * _CUBE


def _nearest(target: str, chips: int) -> str:
    """The numbers of chips nearest to one, by ratio."""
    numbers = sorted({prod(shape) for shape in shapes_of(target)})
    near = sorted(numbers, key=lambda n: max(n / chips, chips / n))[:_NUM_NEAREST]
    return ", ".join(f"{n} ({topology_of(target, n)})" for n in sorted(near))
