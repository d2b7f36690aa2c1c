"""The ways to train a model that a search looks at: chips, mesh, sharding, batch and checkpoint mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from kp_dynamo.aot.topologies import Topology, shapes_of, topology_of
from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh

TOLERANCE = 0.1
"""How far the samples of a step may be from those asked for, which whole samples on every chip rarely meet."""


@dataclass(frozen=True)
class Layout:
    """A slice of chips, its mesh, and how parameters lie on it.

    Attributes:
        topology: The chips.
        data: Devices along the axis "data": chips, and on v7 halves of chips.
        model: Devices along the axis "model"; 1: the mesh has no such axis.
        sharding: "data", "fsdp", "tensor" or "fsdp+tensor"; "" on one chip.
    """

    topology: Topology
    data: int
    model: int
    sharding: str

    @property
    def mesh(self) -> NamedMesh:
        """Always with both axes, so that bounds need no case of their own for one chip."""
        return mesh_of(self.data, self.model)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh as a user writes it."""
        return {DATA: self.data} if self.model == 1 else {DATA: self.data, MODEL: self.model}

    @property
    def is_runnable(self) -> bool:
        """Whether one process runs it: a slice of several hosts needs several."""
        return self.topology.num_hosts == 1


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        layout: The chips and how the model lies on them.
        samples: Samples of a batch for each place along "data".
        accumulate: Batches of a step, whose gradients are added up.
        checkpoint: The checkpoint mode.
    """

    layout: Layout
    samples: int
    accumulate: int
    checkpoint: str

    @property
    def batch(self) -> int:
        """Samples of one call of the model, on all chips together."""
        return self.samples * self.layout.data

    @property
    def step_samples(self) -> int:
        """Samples of an optimizer step."""
        return self.batch * self.accumulate


@cache
def mesh_of(data: int, model: int) -> NamedMesh:
    return NamedMesh.of({DATA: data, MODEL: model})


def sold(target: str, max_chips: int) -> list[Topology]:
    """The slices of a target with at most so many chips, one for each number, the smallest first."""
    numbers = sorted({prod(shape) for shape in shapes_of(target) if prod(shape) <= max_chips})
    return [topology_of(target, number) for number in numbers]


def layouts(topology: Topology, with_tensor: bool) -> Iterator[Layout]:
    """Meshes and shardings of a slice; the axis "model" has a power of two."""
    devices = topology.num_devices
    if devices == 1:
        yield Layout(topology, 1, 1, "")
        return
    yield Layout(topology, devices, 1, "data")
    yield Layout(topology, devices, 1, "fsdp")
    model = 2
    while with_tensor and model <= devices:
        if devices % model == 0:
            yield Layout(topology, devices // model, model, "tensor")
            if model < devices:
                yield Layout(topology, devices // model, model, "fsdp+tensor")
        model *= 2


def batches(data: int, step_samples: float) -> Iterator[tuple[int, int]]:
    """Samples for each place along "data" (powers of two), and the number of batches that come closest to a step."""
    samples = 1
    while samples * data <= step_samples * (1 + TOLERANCE):
        accumulate = max(1, round(step_samples / (samples * data)))
        if abs(samples * data * accumulate - step_samples) <= TOLERANCE * step_samples:
            yield samples, accumulate
        samples *= 2
