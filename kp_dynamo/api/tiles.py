"""Layer sizes against a chip's tiles: sizes that are not a multiple are padded, and the padding is computed."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from torch import nn

from kp_dynamo.hardware import Chip


def off_tile_sizes(model: nn.Module, chip: Chip) -> Iterator[tuple[str, str, float]]:
    """Layers whose matmuls do not fill the chip's matrix unit: path, sizes as text, computed / requested work."""
    for path, module in model.named_modules():
        sizes = _sizes(module)
        padded = [ceil(size / chip.mxu_size) * chip.mxu_size for size in sizes.values()]
        ratio = prod(padded) / max(prod(sizes.values()), 1)
        if ratio > 1:
            text = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % chip.mxu_size)
            yield path or "model", f"{text}: no multiple of {chip.mxu_size}", ratio


def _sizes(module: nn.Module) -> dict[str, int]:
    """The contracted size and the output size of a layer's matmul; empty if it has none."""
    if isinstance(module, nn.Linear):
        return {"in_features": module.in_features, "out_features": module.out_features}
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        contracted = module.in_channels // module.groups * prod(module.kernel_size)
        return {"in_channels x kernel": contracted, "out_channels": module.out_channels // module.groups}
    if isinstance(module, nn.MultiheadAttention):
        return {"head_dim": module.head_dim}
    return {}
