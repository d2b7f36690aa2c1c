"""Grouped convolutions on meshes of several axes, where XLA's partitioner (torch_xla 2.9) goes wrong by itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import kp_dynamo
from tests.sharding.registry import BOTH, compiled, slow_check

THREE = {"data": 2, "a": 2, "b": 2}


class Net(nn.Module):
    """A convolution, and a pair of matmuls that uses the axis "model"."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.convolution, self.up, self.down = convolution, nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.convolution(x)
        pooled = found.flatten(2).mean(2)
        return self.down(torch.tanh(self.up(pooled)))


def difference(convolution: nn.Module, mesh: Any, sharding: Any, size: tuple[int, ...]) -> float:
    """The largest of results and gradients to eager, relative to the largest element, for batches of 8, 5 and 1."""
    torch._dynamo.reset()
    eager = Net(convolution)
    model = kp_dynamo.shard(copy.deepcopy(eager), mesh, sharding)
    run, found = compiled(model), 0.0
    for rows in (8, 5, 1):
        x = torch.randn(rows, *size)
        mine, expected = run(kp_dynamo.shard_batch(x, mesh)), eager(x)
        mine.pow(2).mean().backward()
        expected.pow(2).mean().backward()
        parameters = zip(model.parameters(), eager.parameters(), strict=True)
        pairs = [(mine, expected), *((p.grad, q.grad) for p, q in parameters)]
        found = max(found, *((a.detach().cpu() - b).abs().max().item() / b.abs().max().item() for a, b in pairs))
        model.zero_grad()
        eager.zero_grad()
    return found


def _differences(*names: str) -> dict[str, float]:
    torch.manual_seed(0)
    pair: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
    by_axes = {"up.weight": ("a", "b")}
    cases: dict[str, tuple[nn.Module, Any, Any, tuple[int, ...]]] = {
        "grouped": (nn.Conv2d(32, 64, 3, padding=1, groups=4), BOTH, pair, (32, 6, 6)),
        "depthwise": (nn.Conv1d(64, 64, 3, stride=2, groups=64), {"model": 4, "data": 2}, pair, (64, 9)),
        "transposed": (nn.ConvTranspose2d(32, 64, 3, stride=2, groups=2), BOTH, pair, (32, 4, 4)),
        "divided outputs": (
            nn.Conv2d(32, 64, 1, groups=4), THREE,
            {**by_axes, "convolution.weight": ("a", None, None, None), "convolution.bias": ("b",)}, (32, 4, 4),
        ),
        "divided inputs": (
            nn.Conv2d(32, 64, 1, groups=4), THREE, {**by_axes, "convolution.weight": (None, "a", None, None)},
            (32, 4, 4),
        ),
        "divided channels": (
            nn.Conv2d(64, 64, 3, groups=64), THREE, {**by_axes, "convolution.weight": (("b", "a"), None, None, None)},
            (64, 4, 4),
        ),
    }  # fmt: skip
    return {name: difference(*cases[name]) for name in names}


@slow_check
def grouped_convolutions() -> Any:
    return _differences("grouped", "divided outputs")


@slow_check
def more_grouped_convolutions() -> Any:
    return _differences("depthwise", "transposed", "divided inputs", "divided channels")
