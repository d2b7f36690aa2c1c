"""Division of Pallas kernels, which XLA cannot divide, among the devices of this process.

XLA's two custom calls SPMDFullToShardShape and SPMDShardToFullShape turn a whole tensor into the part of a device and
back; between them, each device runs the operators that are traced, on its part. `aot/kernel_edits.py` writes the same
into the programs that are compiled ahead of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kp_dynamo.compat import xla
from kp_dynamo.lowering import tensor_shardings
from kp_dynamo.lowering.placed_tensors import current_mesh, op_sharding
from kp_dynamo.sharding.mesh import DATA, MODEL, NamedMesh


@dataclass(frozen=True)
class DeviceParts:
    """The parts of tensors [1, batch x heads, ...], divided along all axes of a mesh.

    Attributes:
        mesh: Its axes are "data" and "model", or one of them.
    """

    mesh: NamedMesh

    def takes(self, num_heads: int) -> bool:
        """Whether this number of heads in the batch divides among the devices."""
        return num_heads % self.mesh.num_devices == 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a device."""
        placed = tensor_shardings.annotated(whole, self._sharding(whole.dim()))
        # torch_xla 2.9: its public `enable_manual_sharding` reads the tensor, which has no value during a trace.
        part: torch.Tensor = xla.xlac()._spmd_full_to_shard_shape(placed)
        return part

    def joined(self, part: torch.Tensor) -> torch.Tensor:
        """The tensor of which each device has a part."""
        xlac, shape = xla.xlac(), self.whole_shape(part.shape)
        # torch_xla 2.9: its public `disable_manual_sharding` returns a DTensor subclass.
        xlac._mark_manual_sharding(part, _manual())
        whole: torch.Tensor = xlac._spmd_shard_to_full_shape(part, self._sharding(part.dim()), shape, part.dtype)
        return whole

    def whole_shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of the tensor whose parts have this shape."""
        one, num_heads, *rest = shape
        return [one, num_heads * self.mesh.num_devices, *rest]

    def _sharding(self, rank: int) -> Any:
        axes = tuple(axis for axis in (DATA, MODEL) if self.mesh.has(axis))
        return op_sharding((None, axes, *[None] * (rank - 2)), self.mesh)


def kernel_parts() -> DeviceParts | None:
    """How kernels are divided on the current mesh; None without a mesh, and on one with other axes."""
    mesh = current_mesh()
    if mesh is None or mesh.count(DATA) * mesh.count(MODEL) != mesh.num_devices:
        return None
    return DeviceParts(mesh)


@cache
def _manual() -> Any:
    """XLA's sharding of a part."""
    from torch_xla.distributed.spmd.xla_sharding import ShardingType

    return xla.xlac().OpSharding([], [], [], ShardingType.MANUAL)
