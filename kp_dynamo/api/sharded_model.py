"""`shard(model, mesh, sharding)`: divide a model over all devices of this process; `shard_batch` for its inputs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from kp_dynamo.aot.tensor_plan import needed_plan
from kp_dynamo.api.batch_hook import BatchMesh, shard_arguments, sharded
from kp_dynamo.api.models import checked_model, move, move_data
from kp_dynamo.api.xla_device_manager import has_group
from kp_dynamo.compat import xla
from kp_dynamo.compat.versions import earlier_version
from kp_dynamo.exceptions import TPUConfigurationError, TPUDistributedError
from kp_dynamo.lowering.pending import run_pending
from kp_dynamo.lowering.placed_tensors import mesh_of, place, start_spmd, with_placement
from kp_dynamo.sharding.large_tensors import large_whole_tensors
from kp_dynamo.sharding.mesh import DATA, NamedMesh
from kp_dynamo.sharding.placement import Placement
from kp_dynamo.sharding.rules import check_sharding, placements
from kp_dynamo.sharding.text import listed

logger = logging.getLogger(__name__)


def shard(
    model: nn.Module, mesh: Any, sharding: str | Mapping[str, Any], *, example_args: Sequence[Any] | None = None
) -> nn.Module:
    """Move a model to the devices of this process, in place, and divide it over them.

    Programs run on all devices from now on (torch_xla's SPMD): call this before anything uses a device. Create the
    optimizer afterwards, because the parameters are new. Gradients and the state of the optimizer lie as their
    parameters. At each call of the model, the batch is divided along the axis "data": dimension 0 of the first tensor
    argument, and of every other that is as long there. Calling `shard` again divides the model anew. Code that was
    compiled before is captured again, because Dynamo does not notice the change of the model. A copy of the model is
    not divided as this one is: call `shard` for it.

    Args:
        model: A module, on the CPU or on the XLA device.
        mesh: A dict of axis names to sizes, such as {"data": 4, "model": 2}, or a `torch_xla.distributed.spmd.Mesh`
            with axis names. It has all devices.
        sharding: "data", "fsdp", "tensor", "fsdp+tensor", or a dict of module paths with `*` to "colwise", "rowwise",
            "replicate", or to a tuple with a mesh axis or None for each dimension (docs/sharding.md).
        example_args: Arguments of the model, whose values do not matter. "tensor" needs them for a model that brings no
            plan: it is called on tensors without memory, and its graph says which matmuls can be divided in pairs.

    Returns:
        `model`.

    Raises:
        TPUConfigurationError: `mesh` or `sharding` is invalid, or does not fit the model.
        XLACompilationError: "tensor" needs the graph of the model, and it cannot be traced.
        TPUDistributedError: The mesh does not have all devices, or there are several processes.
        TPUModelPreparationError: `model` is no module, or cannot be moved.
    """
    module, named = checked_model(model), mesh_of(mesh)
    check_sharding(sharding)
    plan = None
    if example_args is not None:
        _check_example(example_args)
        _start(named)  # a trace uses the device
        plan = needed_plan(module, example_args, named, sharding, "example_args")
    found = placements(module, named, sharding, plan)
    _start(named)
    move(module, xla.device())
    if named.num_devices > 1:
        _place(module, found, named)
        _keep_division_when_loaded(module)
        shard_arguments(module, _batch_mesh(named))
        torch._dynamo.reset()  # no guard sees how a parameter lies
        if sharding != "data":  # where every parameter is whole, as requested
            _warn_of_large_tensors(module, found, named)
    return model


def _check_example(example_args: Any) -> None:
    if not isinstance(example_args, Sequence) or isinstance(example_args, str):
        raise TPUConfigurationError(
            f"example_args of type {type(example_args).__name__} is invalid. Allowed: a tuple of arguments, "
            "such as (batch,)."
        )


def shard_batch(batch: Any, mesh: Any) -> Any:
    """A copy of `batch` on the devices, of which each receives only its part along the axis "data" of the mesh.

    Divided are dimension 0 of the first tensor and of every other that is as long there. An uneven batch is padded on
    the devices: some have less work, and the results are the same.

    Args:
        batch: A tensor, or nested dicts, lists and tuples of them.
        mesh: As for `shard`.

    Raises:
        TPUConfigurationError: `mesh` is invalid or has no axis "data".
        TPUDistributedError: `batch` has no tensors, the mesh does not have all devices, or there are several processes.
    """
    named = mesh_of(mesh)
    named.size(DATA)
    _start(named)
    moved = move_data(batch, xla.device(), TPUDistributedError, copy=True, name="batch")
    divided_by = _batch_mesh(named)
    return moved if divided_by is None else sharded(moved, divided_by)


def _start(mesh: NamedMesh) -> None:
    """Use all devices from now on. What can be checked without a device is checked before."""
    if (version := earlier_version()) is not None:
        raise TPUDistributedError(
            f"mesh={mesh} with torch_xla {version} is untested and therefore refused. Allowed: torch_xla 2.9."
        )
    if has_group() and distributed.get_world_size() > 1:
        raise TPUDistributedError(
            f"mesh={mesh} in a job of {distributed.get_world_size()} processes is unsupported: a program over the "
            "devices of several processes needs batches and checkpoints in parts, which this version does not have. "
            "Allowed: one process that drives all its devices. Try: XLADistributedTraining, which has collectives."
        )
    start_spmd(mesh)


def _batch_mesh(mesh: NamedMesh) -> BatchMesh | None:
    """The mesh with the axis "data" first; None if the batch is whole on every device."""
    if not mesh.has(DATA) or mesh.size(DATA) == 1:
        return None
    first = mesh.beginning_with(DATA)
    is_in_order = first.device_ids == tuple(range(first.num_devices))
    return BatchMesh(first.sizes, () if is_in_order else first.device_ids)


def _place(module: nn.Module, found: Mapping[str, Placement], mesh: NamedMesh) -> None:
    run_pending([*module.parameters(), *module.buffers()])
    xla.synchronize()  # torch_xla 2.9 cannot shard a tensor that a running program computes
    for name, buffer in module.named_buffers():
        place(buffer, found[name], mesh)
    for name, parameter in module.named_parameters():
        place(parameter, found[name], mesh)
        _shard_gradient(parameter, _ShardGradient(found[name], mesh))


def _warn_of_large_tensors(module: nn.Module, found: Mapping[str, Placement], mesh: NamedMesh) -> None:
    if large := large_whole_tensors(module, found, mesh):
        parts = [f"{name} ({size / 2**20:.0f} MiB)" for name, size in large.items()]
        logger.warning("sharding leaves large tensors whole on each of %d chips: %s.", mesh.num_devices, listed(parts))


@dataclass(frozen=True)
class _ShardGradient:
    """A hook of a parameter: its gradient lies as it does.

    A program of the backward shards the gradients of the parameters that it reads. The others are left, such as that
    of an embedding, and the sums of several gradients.
    """

    placement: Placement
    mesh: NamedMesh

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or gradient.device.type != "xla":
            return gradient
        return with_placement(gradient, self.placement, self.mesh)


def _shard_gradient(parameter: nn.Parameter, hook: _ShardGradient) -> None:
    """Set the hook in place of an earlier one; also where the parameter is frozen for now."""
    hooks = parameter._backward_hooks or {}
    for at in [at for at, other in hooks.items() if isinstance(other, _ShardGradient)]:
        del hooks[at]
    if not (parameter.is_floating_point() or parameter.is_complex()):
        return
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True).register_hook(hook)
    parameter.requires_grad_(is_trained)


def _keep_division_when_loaded(module: nn.Module) -> None:
    """Let `load_state_dict` leave each tensor divided, also that of a child, and after another `shard`."""
    for child in module.modules():
        hooks = child._load_state_dict_pre_hooks.values()
        if not any(getattr(hook, "hook", None) is _load_through_host for hook in hooks):
            child.register_load_state_dict_pre_hook(_load_through_host)


def _load_through_host(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Load the module's own tensors from the CPU: torch_xla 2.9 divides a tensor as the one that is copied over it."""
    if metadata.get("assign_to_params_buffers"):
        return
    for name in (f"{prefix}{key}" for held in (module._parameters, module._buffers) for key in held):
        value = state.get(name)
        if isinstance(value, torch.Tensor) and value.device.type == "xla":
            state[name] = value.cpu()
