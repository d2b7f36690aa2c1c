"""What the graphs of a step say without a compiler: FLOPs, live activations, traffic, and reads of each parameter.

Figures are those of one chip of an axis "model" for one sample. They scale with the samples that a chip has, except for
what does not depend on the batch, such as the angles of rotary embeddings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from kp_dynamo.aot.placing import StepPlacer
from kp_dynamo.aot.step_graphs import StepGraphs
from kp_dynamo.graph.flops import least_flops, model_flops, recomputed_flops
from kp_dynamo.planner.capture import BATCH
from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh
from kp_dynamo.sharding.placement import axes_of, shard_shape


@dataclass(frozen=True)
class Amount:
    """Bytes: those of one sample, and those that are the same for any batch."""

    per_sample: int = 0
    fixed: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.per_sample + other.per_sample, self.fixed + other.fixed)


@dataclass(frozen=True)
class Activations:
    """What the programs of a step pass to each other, on one chip.

    Attributes:
        live: What is live at a call of a program beside parameters, inputs and their gradients. Calls that need less
            than another one at every batch are left out.
        traffic: What the programs read as arguments and write as results.
    """

    live: tuple[Amount, ...]
    traffic: Amount


@dataclass(frozen=True)
class Flops:
    """FLOPs of the matmuls of a step for one sample.

    Attributes:
        total: All, with causal attention counted whole.
        recomputed: Those that are recomputed.
        least: All that must run: causal attention may skip what its mask hides.
    """

    total: int
    recomputed: int
    least: int

    @property
    def useful(self) -> int:
        """Those of the model, each once."""
        return self.total - self.recomputed


def flops_per_sample(capture: StepGraphs) -> Flops:
    """The FLOPs of a step for one sample."""
    graphs = {id(call.gm): call.gm.graph for call in capture.calls}
    kinds = (model_flops, recomputed_flops, least_flops)
    found = {name: [count(graph) for count in kinds] for name, graph in graphs.items()}
    return Flops(*(sum(found[id(call.gm)][i] for call in capture.calls) // BATCH for i in range(len(kinds))))


def parameter_reads(capture: StepGraphs) -> Mapping[str, int]:
    """How many programs of a step read each parameter: under "fsdp", each gathers it."""
    names = {_id(tensor): name for name, tensor in capture.model.named_parameters()}
    reads: Counter[str] = Counter()
    for call in capture.calls:
        reads.update({names[_id(a)] for a in call.args if isinstance(a, torch.Tensor) and _id(a) in names})
    return reads


def activations(capture: StepGraphs, model_size: int, plan: Mapping[str, Any] | None = None) -> Activations:
    """The activations of a step on one of `model_size` chips that divide its matmuls, by its own plan or by `plan`.

    Raises:
        TPUConfigurationError: The model cannot be divided so.
    """
    mesh = NamedMesh.of({DATA: BATCH, MODEL: model_size})
    placer = StepPlacer(mesh, lambda program, placed: None, plan)
    placer.add_model(capture.model, "tensor" if model_size > 1 else "data")
    placer.add_inputs(capture.args)
    for call in capture.calls:
        placer.place(call)
    given = [*capture.model.parameters(), *capture.model.buffers(), *torch.utils._pytree.tree_leaves(capture.args)]
    walk = _Walk(placer, mesh, {_id(t) for t in given if isinstance(t, torch.Tensor)})
    for position, call in enumerate(capture.calls):
        walk.add(position, call.args, call.results, call.spec.name == "backward")
    return walk.activations(len(capture.calls))


@dataclass
class _Life:
    """A tensor that a program made, and the calls between which it is live."""

    amount: Amount
    first: int
    last: int
    is_gradient: bool


@dataclass
class _Walk:
    """Follows the tensors of a step from call to call."""

    placer: StepPlacer
    mesh: NamedMesh
    given: set[int]
    lives: dict[int, _Life] = field(default_factory=dict)
    traffic: Amount = Amount()

    def add(self, position: int, args: Iterable[Any], results: Iterable[Any], is_backward: bool) -> None:
        moved: dict[int, Amount] = {}
        for is_result, values in ((False, args), (True, results)):
            for tensor in values:
                if isinstance(tensor, torch.Tensor) and _id(tensor) not in self.given:
                    life = self._life(tensor, position, is_backward and is_result)
                    life.last, life.is_gradient = position, life.is_gradient and is_result
                    moved[_id(tensor)] = life.amount
        self.traffic = sum(moved.values(), self.traffic)

    def _life(self, tensor: torch.Tensor, position: int, is_gradient: bool) -> _Life:
        found = self.lives.get(_id(tensor))
        if found is None:
            found = self.lives[_id(tensor)] = _Life(self._amount(tensor), position, position, is_gradient)
        return found

    def _amount(self, tensor: torch.Tensor) -> Amount:
        if not all(isinstance(size, int) for size in tensor.shape):
            return Amount()
        placement = self.placer.placement_of(tensor) or ()
        size = prod(shard_shape(tuple(tensor.shape), placement, self.mesh)) * tensor.element_size()
        is_of_batch = any(DATA in axes_of(along) for along in placement)
        return Amount(per_sample=size) if is_of_batch else Amount(fixed=size)

    def activations(self, num_calls: int) -> Activations:
        """A result of a backward that no later call reads is a gradient of a parameter, which is counted with it."""
        at = [Amount() for _ in range(num_calls)]
        for life in self.lives.values():
            if not life.is_gradient:
                for position in range(life.first, life.last + 1):
                    at[position] += life.amount
        return Activations(tuple(_largest(at)), self.traffic)


def _largest(amounts: Iterable[Amount]) -> list[Amount]:
    """Those that are not smaller than another one in both of their parts."""
    kept: list[Amount] = []
    for amount in sorted(set(amounts), key=lambda a: (-a.per_sample, -a.fixed)):
        if not kept or amount.fixed > kept[-1].fixed:
            kept.append(amount)
    return kept


def _id(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
