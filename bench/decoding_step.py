"""Prompts and single tokens of transformers' Llama in bfloat16, with a `StaticCache` whose tensors are arguments.

The tensors of the cache are [B, H, C, D / H].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.workloads import Workload

WIDTH, INTERMEDIATE, NUM_HEADS, NUM_KEY_HEADS, NUM_TOKENS, NUM_LAYERS = 1024, 2816, 16, 8, 8192, 8


class DecodingStep(nn.Module):
    """Tokens [B, S], positions [S] and the caches of keys and of values by layer -> logits [B, 1, V] of the last token.

    The new rows are written to the caches in place.
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=INTERMEDIATE, num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_KEY_HEADS, num_hidden_layers=NUM_LAYERS, vocab_size=NUM_TOKENS,
        )  # fmt: skip
        model: nn.Module = LlamaForCausalLM(self.config)
        self.model = model.to(torch.bfloat16)

    def forward(self, tokens: Tensor, positions: Tensor, *caches: Tensor) -> Tensor:
        from transformers.cache_utils import StaticCache

        cache = StaticCache(config=self.config, max_cache_len=caches[0].shape[2])
        for layer, keys, values in zip(cache.layers, caches[::2], caches[1::2], strict=True):
            layer.keys, layer.values, layer.is_initialized = keys, values, True
        how = {"past_key_values": cache, "cache_position": positions, "use_cache": True, "logits_to_keep": 1}
        return self.model(tokens, **how).logits


class PromptStep(DecodingStep):
    """The same for a prompt [B, S] whose positions start at 0, as `compile_for_generation` runs it."""

    def forward(self, tokens: Tensor, positions: Tensor, *caches: Tensor) -> Tensor:
        from kp_dynamo.integrations.generation_programs import prefill

        inputs = {"input_ids": tokens, "cache_position": positions, "use_cache": True, "logits_to_keep": 1}
        return prefill(self.model, inputs, caches, (), positions[-1:])


def decoding_step(batch: int, length: int, num_tokens: int = 1, step: type[DecodingStep] = DecodingStep) -> Workload:
    """`length` is that of the caches; `num_tokens` is 1 for a step of decoding, otherwise that of the prompts."""
    size = batch, NUM_KEY_HEADS, length, WIDTH // NUM_HEADS
    caches = (torch.zeros(size, dtype=torch.bfloat16) for _ in range(2 * NUM_LAYERS))
    tokens, positions = torch.zeros(batch, num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    return Workload(step(), (tokens, positions, *caches))
