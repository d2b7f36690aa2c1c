"""Name large tensors that a placement leaves whole on every chip: nothing of that size is replicated silently."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import Placement, is_whole

LARGE_BYTES = 64 * 2**20
"""Above this, a tensor that is whole on every chip is named. A weight of 4096 x 4096 has it in float32."""


def large_whole_tensors(model: nn.Module, found: Mapping[str, Placement], mesh: NamedMesh) -> dict[str, int]:
    """The bytes of each parameter and buffer above `LARGE_BYTES` that every chip holds whole, largest first."""
    if mesh.num_devices == 1:
        return {}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors}
    whole = {name: size for name, size in sizes.items() if size > LARGE_BYTES and is_whole(found[name], mesh)}
    return dict(sorted(whole.items(), key=lambda item: -item[1]))
