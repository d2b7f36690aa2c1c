"""What a model of the zoo is, and the parts that several of them share.

Legend: B batch, S sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn

B, S, VOCAB = 2, 12, 97

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo.

    Attributes:
        name: Name in tests and in the table.
        build: Makes the module, in whatever state the current seed gives.
        inputs: Makes its keyword arguments.
        breaks: Whether its own source breaks Dynamo's graph, in inference or in training: experts chosen by
            value, a check for infinities, layers that are skipped at random.
        seed: Seed of weights and inputs.
        num_seeds: Seeds, from `seed` on, whose bf16 errors are measured as one. More than one where each
            rounding may flip a ReLU or a choice, so that the error of a single seed is mostly chance.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    breaks: bool = False
    seed: int = 0
    num_seeds: int = 1

    def make(self) -> tuple[nn.Module, Inputs]:
        """The module and its inputs: equal at each call, on the CPU, in float32."""
        torch.manual_seed(self.seed)
        module = self.build()
        for child in module.modules():
            if isinstance(child, nn.Dropout):
                child.p = 0.0
        return module, self.inputs()


def tokens(*, mask: bool = False, length: int = S) -> Inputs:
    inputs = {"input_ids": torch.randint(3, VOCAB, (B, length))}
    if mask:
        inputs["attention_mask"] = (torch.arange(length) < torch.tensor([[length], [length - 4]])).long()
    return inputs


def pixels(size: int, name: str = "pixel_values", batch: int = B) -> Inputs:
    return {name: torch.randn(batch, 3, size, size)}


def decoder(kind: str, **more: object) -> nn.Module:
    """A causal language model of the Llama family: grouped-query attention, gated MLP."""
    config = getattr(transformers, f"{kind}Config")(**{
        **dict(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.0, use_cache=False,
            pad_token_id=0,
        ),
        **more,
    })  # fmt: skip
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)
