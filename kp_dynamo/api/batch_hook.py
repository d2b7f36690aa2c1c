"""A hook that divides the arguments of a model over the devices: a batch, along the first axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from kp_dynamo.api.models import opened
from kp_dynamo.compat.dynamo_trace import call_outside_of_graphs
from kp_dynamo.lowering import spmd


@dataclass(frozen=True)
class BatchMesh:
    """A mesh whose first axis divides the batch.

    Attributes:
        shape: The number of devices along each axis.
        device_ids: The devices in row-major order; empty: 0, 1, 2 and so on.
    """

    shape: tuple[int, ...]
    device_ids: tuple[int, ...] = ()


def sharded(data: Any, mesh: BatchMesh) -> Any:
    """`data` with its batch sharded: dimension 0 of every tensor that is as long there as the first one."""
    is_of_batch = _in_batch_of(pytree.tree_leaves(data))

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        return spmd.shard_batch(tensor, mesh.shape, mesh.device_ids) if is_of_batch(tensor) else tensor

    return pytree.tree_map_only(torch.Tensor, shared, data)


def _in_batch_of(values: Sequence[Any]) -> Callable[[torch.Tensor], bool]:
    """Whether a tensor is as long as the first of these that has a length."""
    lengths = [value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return lambda tensor: tensor.dim() > 0 and tensor.shape[0] == lengths[0]


def shard_arguments(module: nn.Module, mesh: BatchMesh | None) -> None:
    """Shard the arguments of `module` over this mesh at each call, instead of any earlier mesh; None: over none."""
    hooks = {} if mesh is None else dict([_hook(mesh)])
    before = {at: other for at, other in module._forward_pre_hooks.items() if isinstance(other, _ShardArguments)}
    if before == hooks:
        return
    for at in before:
        del module._forward_pre_hooks[at], module._forward_pre_hooks_with_kwargs[at]
    module._forward_pre_hooks.update(hooks)
    module._forward_pre_hooks_with_kwargs.update(dict.fromkeys(hooks, True))
    torch._dynamo.reset()  # torch 2.9 has no guard on hooks


_NAMES = ("input_ids", "inputs_embeds", "decoder_input_ids", "input_features", "input_values", "pixel_values")
"""Arguments of transformers' models that have the batch size, the first of them for certain. Their `generate` passes
`cache_position` before them, all by name."""


@dataclass(frozen=True)
class _ShardArguments:
    """A forward pre-hook that shards a model's arguments over the devices.

    The model gets the caller's own tensors, lists and dicts, because it may write to them. In a graph,
    `capture/divided_batch.py` lets what follows read the sharded copies.
    """

    mesh: BatchMesh

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = _tensors((args, kwargs))
        is_of_batch = _in_batch_of([*_tensors(args), *(kwargs.get(name) for name in _NAMES), *tensors])
        for tensor in tensors:
            if is_of_batch(tensor):
                spmd.shard_batch(tensor, self.mesh.shape, self.mesh.device_ids)


def _tensors(data: Any) -> list[torch.Tensor]:
    parts = [opened(leaf) for leaf in pytree.tree_leaves(data)]
    return [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, torch.Tensor)]


@cache
def _hook(mesh: BatchMesh) -> tuple[int, _ShardArguments]:
    """The id of the hook and the hook, the same for all models, because Dynamo recompiles if either one differs.

    Before a compiled module, the hook marks the caller's tensors, as in eager. As a graph of its own it would be one
    more program in every step.
    """
    call_outside_of_graphs(_ShardArguments.__call__.__code__)
    hook = _ShardArguments(mesh)
    return nn.Module().register_forward_pre_hook(hook, with_kwargs=True).id, hook
