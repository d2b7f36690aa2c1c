"""Language models with experts, sliding windows, compressed attention, a state space, and recurrence."""

from __future__ import annotations

from functools import partial

import torch
import transformers
from torch import nn

from tests.zoo.zoo_model import VOCAB, ZooModel, decoder, tokens

# Longer than two windows, so that most positions do not see the first ones.
_WINDOW, _LONG = 8, 24

_LATENT = dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1,
)  # fmt: skip


def _mamba2() -> nn.Module:
    """Chunks of 8 steps: 12 tokens are one and a half."""
    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=64, num_heads=8, head_dim=16, expand=2, n_groups=2, state_size=16, chunk_size=8,
        num_hidden_layers=2, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM(config)


class _LstmModel(nn.Module):
    """A language model of two LSTM layers, its output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.lstm = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, VOCAB)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        hidden, state = self.lstm(self.embedding(input_ids))
        return self.head(hidden), state


LANGUAGE_MODELS = (
    ZooModel(
        "qwen3_moe",
        partial(decoder, "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        tokens,
        breaks=True,
    ),
    ZooModel(
        "gemma3",
        partial(
            decoder, "Gemma3Text", head_dim=16, sliding_window=_WINDOW,
            layer_types=["sliding_attention", "full_attention"],
        ),
        partial(tokens, mask=True, length=_LONG),
    ),
    ZooModel("phi3", partial(decoder, "Phi3", sliding_window=_WINDOW), partial(tokens, length=_LONG)),
    ZooModel("deepseek_v2", partial(decoder, "DeepseekV2", first_k_dense_replace=1, **_LATENT), tokens, breaks=True),
    # Without experts: in float64 they add float32 numbers, and raise.
    ZooModel("deepseek_v3", partial(decoder, "DeepseekV3", first_k_dense_replace=2, **_LATENT), tokens),
    ZooModel("mamba2", _mamba2, tokens),
    ZooModel("lstm", _LstmModel, tokens),
)  # fmt: skip
