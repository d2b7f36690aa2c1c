"""Lower bounds of the memory and the time of a way to train, without a compiler.

Memory of a chip: parameters, optimizer state and inputs are always there. Beside them are at least the activations that
are live at a call of a program, or all gradients; with several batches a step, both. Temporaries of a program and the
padding of tensors come on top.

Time of a batch: no less than its matmuls at the bfloat16 peak, what its programs read and write of each other at the
speed of the memory, or its communication at the speed of the links; the three may overlap. The optimizer reads
gradients, and reads and writes parameters and state, once a step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

from kp_dynamo.aot.links import Kind, Links
from kp_dynamo.hardware import DEVICES
from kp_dynamo.planner.candidates import Candidate, Layout
from kp_dynamo.planner.step_facts import Activations
from kp_dynamo.planner.weights import ALL_ROWS, Weights
from kp_dynamo.sharding.mesh import DATA, MODEL


@dataclass(frozen=True)
class MemoryBound:
    """Bytes of a chip, on v7 of a device.

    Attributes:
        parameters: With buffers.
        optimizer: Its state.
        gradients: All of them, which the optimizer reads.
        activations: The most that programs pass to each other at a time.
        inputs: The inputs of a batch.
        is_added: Whether activations and gradients are live together: from the second batch of a step on.
        whole: The largest weight that a program gathers, with its gradient. No bound: it tells where temporaries fit.
        unread: The part of `parameters` that no program reads, so that compiled figures lack it.
    """

    parameters: int
    optimizer: int
    gradients: int
    activations: int
    inputs: int
    is_added: bool
    whole: int = 0
    unread: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bounds, by name."""
        names = ("parameters", "optimizer", "gradients", "activations", "inputs")
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> int:
        both = self.gradients + self.activations
        beside = both if self.is_added else max(self.gradients, self.activations)
        return self.parameters + self.optimizer + self.inputs + beside

    @property
    def with_whole(self) -> int:
        """The bound with the largest whole weight beside it."""
        return self.total + self.whole


@dataclass(frozen=True)
class TimeBound:
    """Seconds of a step, all its batches together.

    Attributes:
        matmuls: Matmuls at the bfloat16 peak.
        traffic: What programs pass to each other, through the memory.
        gathers: All-gathers of weights along "data".
        gradient_sums: Sums of gradients along "data".
        result_sums: Sums of the results of row matmuls along "model", or of what moves in their place.
        optimizer: Parameters, gradients and state through the memory.
        whole_result_sums: As `result_sums`, if always the results move. No bound: it ranks ways.
        whole_gathers: As `gathers`, if always the weights move. No bound either.
        whole_gradient_sums: As `gradient_sums`, if always the gradients move. No bound either.
    """

    matmuls: float
    traffic: float
    gathers: float
    gradient_sums: float
    result_sums: float
    optimizer: float
    whole_result_sums: float = 0.0
    whole_gathers: float = 0.0
    whole_gradient_sums: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The bounds, by name."""
        return {name: seconds for name, seconds in asdict(self).items() if not name.startswith("whole_")}

    @property
    def links(self) -> float:
        """Communication, at least: that along the two axes of a mesh may overlap."""
        return max(self.gathers + self.gradient_sums, self.result_sums)

    @property
    def total(self) -> float:
        """The bound: all but the optimizer may overlap."""
        return max(self.matmuls, self.traffic, self.links) + self.optimizer

    @property
    def with_exposed_sums(self) -> float:
        """The same if nothing overlaps with a sum, as in programs of libtpu 0.0.21, and all that moves is whole."""
        results = max(self.result_sums, self.whole_result_sums)
        gradients = max(self.gradient_sums, self.whole_gradient_sums)
        gathers = max(self.gathers, self.whole_gathers)
        return max(self.matmuls, self.traffic, gathers) + gradients + results + self.optimizer

    @property
    def without_overlap(self) -> float:
        """The bound without any overlap, which tells apart what is otherwise equal."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Facts:
    """What the bounds of a candidate need to know.

    Attributes:
        weights: The parameters under its sharding.
        activations: Those under its checkpoint mode and axis "model".
        flops: FLOPs of a step for one sample, at least.
        rows: Rows of a matmul for one sample, at least.
        input_bytes: Inputs of one sample.
        state_factor: Optimizer state for each byte of a parameter.
        train: Whether there is a backward.
    """

    weights: Weights
    activations: Activations
    flops: int
    rows: int
    input_bytes: int
    state_factor: float
    train: bool


def memory_bound(candidate: Candidate, facts: Facts) -> MemoryBound:
    """The least memory of a chip, on v7 of a device."""
    trained = facts.weights.trained_bytes
    return MemoryBound(
        parameters=facts.weights.num_bytes,
        optimizer=int(trained * facts.state_factor),
        gradients=trained,
        activations=_activations(candidate, facts),
        inputs=facts.input_bytes * candidate.samples,
        is_added=facts.train and candidate.accumulate > 1,
        whole=facts.weights.largest_whole_bytes,
        unread=facts.weights.unread_bytes,
    )


def _activations(candidate: Candidate, facts: Facts) -> int:
    """What does not depend on the batch may be a copy of a weight, and under "fsdp" then lies as the weight does."""
    copies = candidate.layout.data if "fsdp" in candidate.layout.sharding else 1
    return max((a.per_sample * candidate.samples + a.fixed // copies for a in facts.activations.live), default=0)


def time_bound(candidate: Candidate, facts: Facts) -> TimeBound:
    """The least time of an optimizer step."""
    device, layout, batches = DEVICES[candidate.layout.topology.target], candidate.layout, candidate.accumulate
    trained = facts.weights.trained_bytes
    moved = 3 * trained + 2 * int(trained * facts.state_factor) if facts.train else 0
    devices, rows = layout.topology.num_devices, facts.rows * candidate.samples
    of_batch = facts.rows * candidate.batch
    return TimeBound(
        matmuls=facts.flops * candidate.step_samples / devices / device.bf16_flops,
        traffic=batches * facts.activations.traffic.per_sample * candidate.samples / device.hbm_bytes_per_s,
        gathers=batches * _gathers(layout, facts, of_batch),
        gradient_sums=batches * _gradient_sums(layout, facts, of_batch),
        result_sums=batches * _result_sums(candidate, facts.weights.summed_bytes(rows, facts.train)),
        optimizer=moved / device.hbm_bytes_per_s,
        whole_result_sums=batches * _result_sums(candidate, facts.weights.result_bytes(rows, facts.train)),
        whole_gathers=batches * _gathers(layout, facts, ALL_ROWS),
        whole_gradient_sums=batches * _gradient_sums(layout, facts, ALL_ROWS),
    )


def _gathers(layout: Layout, facts: Facts, rows: int) -> float:
    """Seconds of the all-gathers of weights in a batch with so many rows of activations."""
    return link_seconds(layout, DATA, "all-gather", facts.weights.gathered_bytes(rows))


def _gradient_sums(layout: Layout, facts: Facts, rows: int) -> float:
    """Seconds of the sums of gradients in a batch with so many rows of activations."""
    scattered = link_seconds(layout, DATA, "reduce-scatter", facts.weights.scattered_bytes(rows))
    return scattered + link_seconds(layout, DATA, "all-reduce", facts.weights.reduced_bytes(rows))


def _result_sums(candidate: Candidate, num_bytes: int) -> float:
    """Seconds of the sums of row matmuls in a batch."""
    return link_seconds(candidate.layout, MODEL, "all-reduce", num_bytes)


@lru_cache(maxsize=2**16)  # candidates that differ in the batch move the same weights
def link_seconds(layout: Layout, axis: str, kind: Kind, num_bytes: int) -> float:
    """Seconds of all collectives of a kind along an axis, as if they were one; its groups are alike."""
    if layout.mesh.size(axis) == 1 or num_bytes == 0:
        return 0.0
    return Links(layout.topology).seconds(kind, num_bytes, [_first_group(layout, axis)])


def _first_group(layout: Layout, axis: str) -> tuple[int, ...]:
    other = MODEL if axis == DATA else DATA
    return layout.mesh.devices_along((other, axis))[: layout.mesh.size(axis)]
