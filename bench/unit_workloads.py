"""The models that a v5e's compiler compiles: width 1024, one block (`gpt4`: four) and a head, on the meta device.

Shapes: B batch, S length, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.workloads import Bert, Llama, Workload
from demo.model import Gpt

WIDTH, NUM_HEADS, NUM_TOKENS = 1024, 16, 8192


class Vit(nn.Module):
    """Images [B, 3, 224, 224] -> logits of 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 16, 16)
        layer = nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens).mean(1))


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, as in ResNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.convs(x)).relu()


def _mlp(length: int) -> Workload:
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    return Workload(nn.Sequential(*layers), (torch.empty(4 * length, WIDTH),))


def _tokens(length: int) -> Tensor:
    """[B, S]: four rows of 512, one of 2048."""
    return torch.empty(max(1, 2048 // length), length, dtype=torch.int64)


def _gpt(length: int) -> Workload:
    return Workload(Gpt(1, WIDTH, NUM_HEADS, NUM_TOKENS), (_tokens(length),))


def _gpt4(length: int) -> Workload:
    """Where blocks are saved from, and not the head alone, sets the peak of training."""
    return Workload(Gpt(4, WIDTH, NUM_HEADS, NUM_TOKENS), (_tokens(length),))


def _llama(length: int) -> Workload:
    return Workload(Llama(1, WIDTH, NUM_HEADS, NUM_TOKENS), (_tokens(length),))


def _bert(length: int) -> Workload:
    tokens = _tokens(length)
    return Workload(Bert(1, WIDTH, NUM_HEADS, NUM_TOKENS), (tokens, torch.empty(tokens.shape, dtype=torch.bool)))


def _vit(_: int) -> Workload:
    return Workload(Vit(), (torch.empty(8, 3, 224, 224),))


def _conv(_: int) -> Workload:
    stem = nn.Conv2d(3, 128, 7, 4, 3, bias=False), nn.BatchNorm2d(128), nn.ReLU()
    layers = *stem, Residual(128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000)
    return Workload(nn.Sequential(*layers), (torch.empty(8, 3, 224, 224),))


class _T5(nn.Module):
    """Tokens and targets [B, S] -> logits, with T5's relative positions, cross attention and gated GELU."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            d_model=WIDTH, d_kv=64, d_ff=2816, num_layers=1, num_heads=NUM_HEADS, vocab_size=NUM_TOKENS,
            feed_forward_proj="gated-gelu", use_cache=False, dropout_rate=0.0,
        )  # fmt: skip
        self.model = T5ForConditionalGeneration(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model(input_ids=tokens, decoder_input_ids=targets, use_cache=False).logits


def _t5(length: int) -> Workload:
    return Workload(_T5(), (_tokens(length), _tokens(length)))


MODELS: dict[str, Callable[[int], Workload]] = {
    "mlp": _mlp, "gpt": _gpt, "gpt4": _gpt4, "llama": _llama, "bert": _bert, "vit": _vit, "conv": _conv, "t5": _t5,
}  # fmt: skip
WITH_LENGTHS = ("gpt", "llama", "bert", "t5")
CAUSAL = ("gpt", "gpt4", "llama")


def workload(name: str, length: int) -> Workload:
    """A model and its inputs on the meta device."""
    with torch.device("meta"):
        return MODELS[name](length)
