"""Place tensors on the devices of this process, as a placement on a named mesh says.

A mesh of torch_xla may have its devices in any order; a dict of axes has them in the order 0, 1, 2 and so on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils.weak import WeakTensorKeyDictionary

from kp_dynamo.compat import importing, xla
from kp_dynamo.exceptions import TPUConfigurationError, TPUDistributedError
from kp_dynamo.hardware import ONE_CHIP, Spread
from kp_dynamo.lowering import spmd, tensor_shardings
from kp_dynamo.ops.gathered import Placing
from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh
from kp_dynamo.sharding.placement import REPLICATED, Placement, axes_of, hlo_sharding, is_whole, placement_of

_meshes: dict[NamedMesh, None] = {}
_placed_on: MutableMapping[torch.Tensor, NamedMesh] = WeakTensorKeyDictionary()
_current: ContextVar[NamedMesh | None] = ContextVar("mesh of what is compiled", default=None)


def named_meshes() -> list[NamedMesh]:
    """The meshes of this process on which tensors were placed, the last one first."""
    return list(reversed(_meshes))


def current_mesh() -> NamedMesh | None:
    """The mesh of what is compiled now; outside of `on_their_mesh`, the last one on which tensors were placed."""
    return _current.get() or next(reversed(_meshes), None)


@contextmanager
def on_their_mesh(tensors: Iterable[Any], captured: NamedMesh | None = None) -> Iterator[None]:
    """Within the context, the current mesh is the one that these tensors lie on: models may have different ones.

    `captured` is the mesh of the capture, for a graph whose tensors may lie on several meshes, such as a backward.
    """
    token = _current.set(_common_mesh(list(tensors), captured) if len(_meshes) > 1 else None)
    try:
        yield
    finally:
        _current.reset(token)


def _common_mesh(given: Sequence[Any], captured: NamedMesh | None) -> NamedMesh | None:
    """The mesh on which these tensors were placed, else `captured` or the last one on which all of them lie.

    Without either, the current one. A dimension in eight parts may lie along one axis of size 8, or along two of sizes
    4 and 2: one axis comes first.
    """
    tensors = [t for t in given if isinstance(t, torch.Tensor) and not is_fake(t)]
    if len(placed_on := {_placed_on[t] for t in tensors if t in _placed_on}) == 1:
        return placed_on.pop()
    texts = {(text, t.dim()) for t in tensors if (text := _sharding_text(t)) not in ("", REPLICATED)}
    if captured is not None and all(placement_of(text, captured, rank) is not None for text, rank in texts):
        return captured
    least: tuple[int, NamedMesh] | None = None
    for mesh in named_meshes():
        found = [placement_of(text, mesh, rank) for text, rank in texts]
        if None in found or not found:
            continue
        num_shared = sum(len(axes_of(along)) > 1 for placement in found for along in placement or ())
        if least is None or num_shared < least[0]:
            least = num_shared, mesh
    return _current.get() if least is None else least[1]


def _sharding_text(tensor: torch.Tensor) -> str:
    """XLA's text of how a tensor lies; "" if nothing says it."""
    return str(xla.xlac()._get_xla_sharding_spec(tensor)) if tensor.device.type == "xla" else ""


def device_spread() -> Spread:
    """The devices that share the work of a program, by the current mesh.

    Without such a mesh, because the user marks tensors with torch_xla, the batch is taken to be divided among all.
    """
    if not spmd.is_spmd():
        return ONE_CHIP
    count, mesh = xla.num_devices(), current_mesh()
    return Spread(count, count) if mesh is None else Spread(count, mesh.count(DATA), mesh.count(MODEL))


def placing_on_mesh() -> Placing | None:
    """How a program places its tensors on the current mesh; None without a mesh."""
    mesh = current_mesh()
    if mesh is None:
        return None
    return Placing(lambda x, where: tensor_shardings.annotated(x, op_sharding(where, mesh)), DATA, mesh.is_along_batch)


def placement_of_argument(tensor: torch.Tensor) -> Placement | None:
    """How an argument lies on the current mesh; None without a mesh, and for a tensor that lies in another way."""
    mesh = current_mesh()
    text = "" if mesh is None else _sharding_text(tensor)
    return placement_of(text, mesh, tensor.dim()) if mesh is not None and text else None


def mesh_of(given: Any) -> NamedMesh:
    """From a dict of axis names to sizes, a NamedMesh, or a Mesh of `torch_xla.distributed.spmd` with axis names.

    Raises:
        TPUConfigurationError: `given` is of another type, or an invalid mesh.
    """
    if isinstance(given, Mapping | NamedMesh):
        return NamedMesh.of(given)
    importing.load()
    from torch_xla.distributed.spmd import Mesh

    if not isinstance(given, Mesh):
        return NamedMesh.of(given)  # raises, and says what is allowed
    if not given.axis_names:
        raise TPUConfigurationError(
            f"mesh={given} has no axis names. Allowed: the axes 'data' and 'model'. Try: Mesh(device_ids, mesh_shape, "
            "('data', 'model'))."
        )
    sizes, ids = tuple(int(n) for n in given.mesh_shape), tuple(int(i) for i in given.device_ids)
    return NamedMesh(tuple(given.axis_names), sizes, ids)


def start_spmd(mesh: NamedMesh) -> None:
    """Let programs run on all devices of this process from now on, if the mesh is made of them.

    Raises:
        TPUDistributedError: The mesh has more or fewer devices, the job has several processes, or a device has been
            used without SPMD.
    """
    # Check first: enabling SPMD cannot be undone.
    count = xla.num_devices()
    if mesh.num_devices != count:
        raise TPUDistributedError(
            f"mesh={mesh} has {mesh.num_devices} devices, but there are {count}. Allowed: a mesh of all {count} "
            f"devices, such as {{'data': {count}}}. Try: CPU_NUM_DEVICES={mesh.num_devices} to try it on the CPU."
        )
    if count > 1:
        spmd.switch_on()
    num_processes = xla.world()[0]
    if num_processes > 1:
        raise TPUDistributedError(
            f"mesh={mesh} in a job of {num_processes} processes is unsupported: the parts of a batch and of a "
            "checkpoint that other processes hold are not handled yet. Allowed: one process that drives all devices "
            "of its host."
        )
    if count > 1:
        _meshes.pop(mesh, None)
        _meshes[mesh] = None


def place(tensor: torch.Tensor, placement: Placement, mesh: NamedMesh) -> None:
    """Divide an XLA tensor over the devices of a mesh, in place.

    If the tensor is not on the devices yet, each device gets only its part. Otherwise it goes through the host.
    """
    xlac = xla.xlac()
    if xlac._get_xla_sharding_spec(tensor):
        xlac._xla_clear_sharding(tensor)
    # Like the public `mark_sharding` of torch_xla 2.9, but without the DTensor subclass that it returns.
    xlac._xla_mark_sharding(tensor, op_sharding(placement, mesh))
    _placed_on[tensor] = mesh


@cache
def op_sharding(placement: Placement, mesh: NamedMesh) -> Any:
    """XLA's sharding of a placement that has one entry for each dimension."""
    from torch_xla.distributed.spmd import Mesh

    if is_whole(placement, mesh):
        return spmd.replicated()
    return Mesh(list(mesh.device_ids), mesh.sizes, mesh.names).get_op_sharding(placement)


def with_placement(tensor: torch.Tensor, placement: Placement, mesh: NamedMesh) -> torch.Tensor:
    """`tensor`, or a copy that XLA divides so if it lies in another way or is pending."""
    is_there = xla.xlac()._get_xla_sharding_spec(tensor) == _text(placement, mesh)
    return tensor if is_there else tensor_shardings.annotated(tensor, op_sharding(placement, mesh))


@cache
def _text(placement: Placement, mesh: NamedMesh) -> str:
    return hlo_sharding(placement, mesh, len(placement))
