"""The models that are measured. Shapes: B batch, T length, D width, H heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo.model import Gpt

SEED = 0
VOCABULARY = 256


@dataclass(frozen=True)
class Workload:
    """A model on the CPU in float32, and inputs for it."""

    model: nn.Module
    inputs: tuple[Tensor, ...]

    def on(self, device: torch.device | str) -> Workload:
        """The same on another device; moves the model itself."""
        return Workload(self.model.to(device), tuple(t.to(device) for t in self.inputs))


class RmsNorm(nn.Module):
    """[B, T, D] -> [B, T, D], each vector scaled to a root mean square of one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class RotaryAttention(nn.Module):
    """Causal self-attention without biases, with rotary positions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = (project(x) for project in (self.query, self.key, self.value))
        query, key, value = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in projected)
        y = F.scaled_dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def _rotate(x: Tensor) -> Tensor:
    """[B, H, T, D / H], each half-pair of features turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angle.cos(), angle.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        hidden = width * 8 // 3 // 128 * 128
        self.norm_attention, self.norm_mlp = RmsNorm(width), RmsNorm(width)
        self.attention = RotaryAttention(width, num_heads)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Tokens [B, T] int64 -> logits [B, T, VOCABULARY]."""

    def __init__(self, num_blocks: int, width: int, num_heads: int = 4, num_tokens: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, num_heads) for _ in range(num_blocks))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, num_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bert(nn.Module):
    """Tokens [B, T] int64 and which of them count, [B, T] bool -> logits of two classes [B, 2]."""

    def __init__(self, num_blocks: int, width: int, num_heads: int = 4, num_tokens: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, 0.0, F.gelu, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, is_kept: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens), src_key_padding_mask=~is_kept)[:, 0])


def llama(num_blocks: int, width: int = 256, batch: int = 1, length: int = 64) -> Workload:
    torch.manual_seed(SEED)
    return Workload(Llama(num_blocks, width), (torch.randint(VOCABULARY, (batch, length)),))


def gpt(num_blocks: int, width: int = 256, batch: int = 4, length: int = 128) -> Workload:
    torch.manual_seed(SEED)
    return Workload(Gpt(num_blocks, width), (torch.randint(VOCABULARY, (batch, length)),))


def bert(num_blocks: int, width: int = 256, batch: int = 4, length: int = 128) -> Workload:
    torch.manual_seed(SEED)
    lengths = torch.randint(length // 2, length + 1, (batch, 1))
    return Workload(
        Bert(num_blocks, width), (torch.randint(VOCABULARY, (batch, length)), torch.arange(length) < lengths)
    )


def mlp(num_parameters: int, width: int = 16) -> Workload:
    """Linear layers with biases and a ReLU after each, batch 1, so that the call costs more than its arithmetic."""
    torch.manual_seed(SEED)
    layers = (layer for _ in range(num_parameters // 2) for layer in (nn.Linear(width, width), nn.ReLU()))
    return Workload(nn.Sequential(*layers), (torch.randn(1, width),))


SMALL: dict[str, Callable[[], Workload]] = {
    "gpt": lambda: gpt(num_blocks=2),
    "llama": lambda: llama(num_blocks=2, batch=4, length=128),
    "bert": lambda: bert(num_blocks=2),
}
