"""One token of transformers' Llama in bfloat16, with a `StaticCache` whose tensors [B, H, C, D / H] are arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.workloads import Workload

WIDTH, INTERMEDIATE, NUM_HEADS, NUM_KEY_HEADS, NUM_TOKENS, NUM_LAYERS = 1024, 2816, 16, 8, 8192, 8


class DecodingStep(nn.Module):
    """Tokens [B, 1], a position [1] and the caches of keys and of values by layer -> logits [B, 1, V].

    The new row is written to the caches in place.
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=INTERMEDIATE, num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_KEY_HEADS, num_hidden_layers=NUM_LAYERS, vocab_size=NUM_TOKENS,
        )  # fmt: skip
        self.model = LlamaForCausalLM(self.config).to(torch.bfloat16)

    def forward(self, tokens: Tensor, position: Tensor, *caches: Tensor) -> Tensor:
        from transformers.cache_utils import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=caches[0].shape[2])
        for layer, keys, values in zip(cache.layers, caches[::2], caches[1::2], strict=True):
            layer.keys, layer.values, layer.is_initialized = keys, values, True
        return self.model(tokens, past_key_values=cache, cache_position=position, use_cache=True).logits


def decoding_step(batch: int, length: int) -> Workload:
    """`length` is that of the caches."""
    size = batch, NUM_KEY_HEADS, length, WIDTH // NUM_HEADS
    caches = (torch.zeros(size, dtype=torch.bfloat16) for _ in range(2 * NUM_LAYERS))
    tokens, position = torch.zeros(batch, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    return Workload(DecodingStep(), (tokens, position, *caches))
