"""A small byte-level GPT with rotary positions. Shapes: B batch, T length, D width, H heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention, [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split_heads(project(x)) for project in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, D / H]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def rotate(x: Tensor) -> Tensor:
    """[B, H, T, D / H]: pairs of features turned by angles that grow with the position (RoPE)."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    cos, sin = angle.cos(), angle.sin()
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    """Attention, then two linear layers with a GELU between them, each beside the residual stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Gpt(nn.Module):
    """Bytes [B, T] int64 -> logits of each next byte [B, T, 256]."""

    def __init__(self, num_layers: int = 4, width: int = 256, num_heads: int = 4, num_tokens: int = NUM_BYTES) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte of what the model expects after `tokens` [B, T]."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
