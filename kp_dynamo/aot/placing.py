"""How the tensors of a step lie on the chips of a slice, decided while the step runs on fake tensors.

Parameters and buffers lie as the sharding says, and inputs along the batch. A gradient lies as what it is the gradient
of. Other results lie as `graph/placements.py` says. All results of all programs are pinned, so that XLA replicates
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kp_dynamo.aot.worker_process import KernelParts
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.graph.placements import result_placements
from kp_dynamo.lowering.fake_run import ExportedProgram, GraphCall
from kp_dynamo.sharding.large_tensors import LARGE_BYTES
from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh
from kp_dynamo.sharding.placement import Placement, hlo_sharding, is_whole, shard_shape
from kp_dynamo.sharding.rules import placements


@dataclass
class _Known:
    """A tensor whose placement is decided."""

    storage: StorageWeakRef
    shape: tuple[int, ...]
    placement: Placement


@dataclass
class _Forward:
    """A forward whose backward has not run yet."""

    args: list[Placement]
    shapes: list[tuple[int, ...]]
    returned: list[tuple[tuple[int, ...], Placement]]


@dataclass
class StepPlacer:
    """Places the tensors of a step on a mesh; the `Placer` of an `Export`.

    Attributes:
        mesh: The mesh of all devices.
        on_program: Called with a program and the same with its shardings, at its first call.
        plan: The plan of "tensor" for a model that brings none.
        whole: One line for each large tensor that is whole on every device.
        device_word: What errors call a device: "chip", on v7 "device".
    """

    mesh: NamedMesh
    on_program: Callable[[ExportedProgram, ExportedProgram], None]
    plan: Mapping[str, Any] | None = None
    whole: list[str] = field(default_factory=list)
    device_word: str = "chip"
    _known: dict[int, _Known] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _waiting: list[_Forward] = field(default_factory=list)

    def add_model(self, model: Any, sharding: Any) -> None:
        """The parameters and buffers of a module.

        Raises:
            TPUConfigurationError: The sharding is invalid for the model, or for a function, which has no parameters.
        """
        if not isinstance(model, nn.Module):
            if sharding != "data":
                raise TPUConfigurationError(
                    f"sharding={sharding!r} needs a module: a function has no parameters. Allowed: 'data'."
                )
            return
        found = placements(model, self.mesh, sharding, self.plan)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self._names[_id(tensor)] = name
            self._set(tensor, found.get(name, ()))

    def add_inputs(self, args: Any) -> None:
        """The inputs of the model: those with the batch size of the first one lie along the batch.

        Raises:
            TPUConfigurationError: The batch does not divide.
        """
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
        batch = next((int(t.shape[0]) for t in tensors if t.dim()), 1)
        count = self.mesh.count(DATA)
        if batch % count:
            raise TPUConfigurationError(
                f"a batch of {batch} does not divide among {count} {self.device_word}s along {DATA!r}. Allowed: a "
                f"multiple of {count}. Try: pad the batch, or make the axis smaller."
            )
        for i, tensor in enumerate(tensors):
            self._names.setdefault(_id(tensor), f"input {i}")
            is_batch = tensor.dim() > 0 and tensor.shape[0] == batch and count > 1
            self._set(tensor, (DATA,) if is_batch else ())

    def place(self, call: GraphCall) -> tuple[Sequence[str], Sequence[str]]:
        """The shardings of the arguments and of the results of a call, in XLA's notation."""
        self._require_partitionable(call.gm)
        forward = self._forward_of(call) if call.spec.name == "backward" else None
        given = [self.placement_of(a) or () for a in call.args]
        if forward is not None:
            given = _with_tangents(given, call.args, [self.placement_of(a) is None for a in call.args], forward)
        results = result_placements(call.gm.graph, given, self.mesh)
        if forward is not None and len(forward.args) == len(results):
            results = forward.args
        written = zip(call.spec.overwritten, results, strict=False)
        renewed = [placement if i is None else given[i] for i, placement in written]
        results = [*renewed, *results[len(renewed) :]]
        self._record(call, given, results)
        return self._texts(call.args, given), self._texts(call.results, results)

    @property
    def kernel_parts(self) -> int:
        """Among how many chips the heads of all sequences are divided in a kernel."""
        return self.mesh.count(DATA) * self.mesh.count(MODEL)

    @property
    def kernels(self) -> KernelParts:
        """How the kernels of a program are divided."""
        axes = tuple(axis for axis in (DATA, MODEL) if self.mesh.has(axis))
        return hlo_sharding((None, axes, None, None), self.mesh, 4), self.kernel_parts

    def _require_partitionable(self, gm: fx.GraphModule) -> None:
        """XLA cannot divide a Pallas kernel. Along other axes each chip would compute all of it."""
        kernels = [n for n in gm.graph.nodes if str(n.target).startswith("kp.flash")]
        if kernels and self.kernel_parts < self.mesh.num_devices:
            raise TPUConfigurationError(
                f"{kernels[0].target} is a Pallas kernel, which is divided along {DATA!r} and {MODEL!r} only, but the "
                f"mesh is {self.mesh}. Try: a mesh of these axes, or leave FlashAttention() out of extra_passes."
            )

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """The bytes that one chip holds of a tensor."""
        placement = self.placement_of(tensor)
        if not placement:
            return int(tensor.untyped_storage().nbytes())
        return prod(shard_shape(tuple(tensor.shape), placement, self.mesh)) * tensor.element_size()

    def receive(self, program: ExportedProgram, placed: ExportedProgram) -> None:
        """Pass a program on, at its first call."""
        self.on_program(program, placed)

    def _record(self, call: GraphCall, given: list[Placement], results: list[Placement]) -> None:
        """The tensors of a call, and for a forward what its backward needs to know."""
        for tensor, placement in zip(call.args, given, strict=True):
            if isinstance(tensor, torch.Tensor) and self.placement_of(tensor) is None:
                self._set(tensor, placement)
        for i, (tensor, placement) in enumerate(zip(call.results, results, strict=True)):
            if isinstance(tensor, torch.Tensor) and self.placement_of(tensor) is None:
                self._set(tensor, placement)
                self._names[_id(tensor)] = f"result {i} of a {call.spec.name}, {_result_name(call.gm, i)}"
        for tensor, placement in [*zip(call.args, given, strict=True), *zip(call.results, results, strict=True)]:
            if isinstance(tensor, torch.Tensor) and is_whole(placement, self.mesh):
                self._note_whole(tensor)
        if call.spec.name == "forward":
            returned = list(zip(call.results, results, strict=True))[: call.spec.num_returned]
            pairs = [(tuple(r.shape), p) for r, p in returned if isinstance(r, torch.Tensor)]
            self._waiting.append(_Forward(given, list(map(_shape, call.args)), pairs))

    def _forward_of(self, call: GraphCall) -> _Forward | None:
        """The last forward whose arguments have the shapes of a backward's gradients, which is then done."""
        shapes = list(map(_shape, call.results))
        for i in range(len(self._waiting) - 1, -1, -1):
            pairs = list(zip(shapes, self._waiting[i].shapes, strict=False))
            if len(shapes) == len(self._waiting[i].shapes) and all(g in ((), f) for g, f in pairs):
                return self._waiting.pop(i)
        return None

    def _texts(self, tensors: Iterable[Any], placements: Iterable[Placement]) -> list[str]:
        pairs = zip(tensors, placements, strict=True)
        return [hlo_sharding(p, self.mesh, t.dim()) if isinstance(t, torch.Tensor) else "" for t, p in pairs]

    def _note_whole(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if size > LARGE_BYTES and self.mesh.num_devices > 1:
            name = self._names.get(_id(tensor), "a tensor")
            dtype = str(tensor.dtype).removeprefix("torch.")
            line = f"{name}: {dtype}{list(tensor.shape)}, {size / 2**20:.0f} MiB"
            if line not in self.whole:
                self.whole.append(line)

    def _set(self, tensor: torch.Tensor, placement: Placement) -> None:
        storage = tensor.untyped_storage()
        self._known[_id(tensor)] = _Known(StorageWeakRef(storage), tuple(tensor.shape), placement)

    def placement_of(self, value: Any) -> Placement | None:
        """The placement of a tensor, None if it is unknown; a view of another shape is whole."""
        known = self._known.get(_id(value)) if isinstance(value, torch.Tensor) else None
        if known is None or known.storage.expired():
            return None
        return known.placement if known.shape == tuple(value.shape) else ()


def _with_tangents(
    given: list[Placement], args: Sequence[Any], is_new: Sequence[bool], forward: _Forward
) -> list[Placement]:
    """The placements of a backward's arguments: a new one is the gradient of a result of the forward."""
    left = iter(forward.returned)

    def of_tangent(shape: tuple[int, ...]) -> Placement:
        return next((placement for size, placement in left if size == shape), ())

    pairs = zip(given, args, is_new, strict=True)
    return [of_tangent(_shape(a)) if new and isinstance(a, torch.Tensor) else p for p, a, new in pairs]


def _id(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _result_name(gm: fx.GraphModule, position: int) -> str:
    results: Any = gm.graph.output_node().args[0]
    return str(results[position]) if isinstance(results, (list, tuple)) else str(results)
