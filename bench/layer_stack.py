"""Equal layers of a Llama in bfloat16, without embedding and head, on the meta device: a forward, or a decoding step.

Shapes: B batch, S length, D width, H heads, C length of the caches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workloads import RmsNorm, Workload

WIDTH, INTERMEDIATE, NUM_HEADS = 1024, 2816, 16
HEAD_WIDTH = WIDTH // NUM_HEADS


class Layer(nn.Module):
    """[B, S, D] -> [B, S, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = RmsNorm(WIDTH), RmsNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, INTERMEDIATE, bias=False) for _ in range(2))
        self.down = nn.Linear(INTERMEDIATE, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self._projected(x, cos, sin)
        return self._finished(x, F.scaled_dot_product_attention(query, key, value, is_causal=True))

    def decode(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Attend to caches [B, H, C, D / H], and return x and what a caller writes to them."""
        query, key, value = self._projected(x, cos, sin)
        return self._finished(x, F.scaled_dot_product_attention(query, keys, values)), key, value

    def _projected(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.norm_attention(x)
        projected = (project(h) for project in (self.query, self.key, self.value))
        query, key, value = (p.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for p in projected)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    def _finished(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Stack(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class DecodingStack(Stack):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        rows: list[Tensor] = []
        for layer, keys, values in zip(self.layers, caches[::2], caches[1::2], strict=True):
            x, *new = layer.decode(x, cos, sin, keys, values)
            rows += new
        return x, *rows


def _forward(num_layers: int) -> Workload:
    return Workload(Stack(num_layers), (*_activations(4, 512),))


def _decoding_step(num_layers: int) -> Workload:
    caches = (torch.empty(8, NUM_HEADS, 2048, HEAD_WIDTH) for _ in range(2 * num_layers))
    return Workload(DecodingStack(num_layers), (*_activations(8, 1), *caches))


def _activations(batch: int, length: int) -> tuple[Tensor, ...]:
    return torch.empty(batch, length, WIDTH), torch.empty(length, HEAD_WIDTH), torch.empty(length, HEAD_WIDTH)


WORKLOADS: dict[str, Callable[[int], Workload]] = {"B 4, S 512": _forward, "decode, B 8, cache 2048": _decoding_step}


def workload(name: str, num_layers: int) -> Workload:
    with torch.device("meta"):
        made = WORKLOADS[name](num_layers)
    return Workload(made.model.to(torch.bfloat16), tuple(t.to(torch.bfloat16) for t in made.inputs))
