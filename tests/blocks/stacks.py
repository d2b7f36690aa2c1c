"""Models of repeated layers, as people write them, for the tests of divided graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Layer(nn.Module):
    """A residual MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)


class Stack(nn.Module):
    """Layers between an embedding and a head; `of` makes one."""

    def __init__(self, num_layers: int = 4, of: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(of() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen Linear and two small ones that train, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x) + self.second(self.first(x))) + x


class Unembedded(Stack):
    """Layers that begin with the input."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithHiddenStates(Stack):
    """Returns every hidden state, and a loss that all of them enter."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        x, states = self.embed(x), []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return self.head(x), states, torch.stack([s.square().mean() for s in states]).sum()


class UNet(Stack):
    """The first half's results return in the second half, last first."""

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.embed(x), []
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            x = layer(x)
            skips.append(x)
        for layer in self.layers[half:]:
            x = layer(x + skips.pop())
        return self.head(x)


class Shared(Stack):
    """One layer many times, as in ALBERT."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(4):
            x = self.layers[0](x)
        return self.head(x)


class Masked(nn.Module):
    """Attention with a learned bias and a mask that all layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5, 5))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = self.bias.masked_fill(~keep, float("-inf"))
        for layer in self.layers:
            h = layer(x)
            x = x + torch.softmax(h @ h.transpose(-1, -2) + mask, -1) @ h
        return x


class EncoderDecoder(nn.Module):
    """Two different repeats; the layers of the second read the result of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Layer() for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = torch.tanh(layer(torch.cat([x, y], -1))) + y * 0.5
        return y


class Alternating(nn.Module):
    """Local and global layers in turns: a period of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            h = layer(x)
            x = x + (torch.tanh(h) * 0.5 if number % 2 else torch.relu(h).cumsum(1))
        return x


class Residual(nn.Module):
    """A residual block of convolutions with BatchNorm and in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(self.conv(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += x
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Conv2d(3, 4, 3), nn.ModuleList(Residual() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x.mean((2, 3))


class Cached(nn.Module):
    """Writes its keys into the caller's caches, and attends to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, position: Tensor, caches: list[Tensor]) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            h = layer(x)
            cache.index_copy_(1, position, h)
            x = x + torch.softmax(h @ cache.transpose(-1, -2).clone(), -1) @ cache.clone()
        return x


class Autocast(Stack):
    """All layers in one autocast region, which begins before the first."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x).float()


class AutocastLayers(Stack):
    """Only the layers in an autocast region."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return self.head(x.to(self.head.weight.dtype))


class Frozen(Stack):
    """The first half without gradients, as when an encoder is frozen."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.embed(x)
            for layer in self.layers[:3]:
                x = layer(x)
        for layer in self.layers[3:]:
            x = layer(x)
        return self.head(x)


class Checkpointed(Stack):
    """Each layer under torch.utils.checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Views(Stack):
    """A transposed value crosses the layers, and results share memory."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(x).transpose(0, 1)
        for layer in self.layers:
            x = layer(x)
        return x, x.transpose(0, 1), x[0]


class InPlace(Stack):
    """The residual stream is one tensor that every layer writes to."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 1.0
        for layer in self.layers:
            x += torch.tanh(layer.up(x.clone())).mean(-1, keepdim=True)
        return self.head(x)


class Numbered(Stack):
    """A constant differs from layer to layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            x = layer(x) * (1.0 + 0.1 * number)
        return self.head(x)
