"""The memory of a chip in a training step, beside what a user derives from the sizes of the model."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import kp_dynamo
from kp_dynamo.aot.report import AotReport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo
]

CHIPS, LENGTH, WIDTH, HEAD_WIDTH, LAYERS = 4, 1024, 1024, 128, 3
HIDDEN = LENGTH * WIDTH * 4  # the hidden states of the one sequence of a chip, [1, S, D] in float32


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        heads = WIDTH // HEAD_WIDTH
        config = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=2816, num_attention_heads=heads, num_key_value_heads=heads,
            num_hidden_layers=LAYERS, vocab_size=2048, use_cache=False, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


@functools.cache
def model() -> Loss:
    with torch.device("meta"):
        return Loss()


@functools.cache
def report() -> AotReport:
    options = {"level": "aggressive", "blocks": "on", "checkpoint": "blocks"}
    tokens = torch.empty(CHIPS, LENGTH, dtype=torch.long, device="meta")
    return kp_dynamo.aot_compile(
        model(), (tokens,), target="v5e", chips=CHIPS, sharding="fsdp", train=True, options=options
    )


def parameter_bytes(*names: str) -> float:
    """Of one chip: norms are whole, everything else is divided. Without names, of all parameters."""
    found = [p for name, p in model().named_parameters() if not names or any(part in name for part in names)]
    return sum(p.numel() * 4 / (1 if p.dim() == 1 else CHIPS) for p in found)


def held_beside_activations() -> float:
    """The parameters; the cosines and sines of the positions, which every layer reads."""
    return parameter_bytes() + 2 * LENGTH * HEAD_WIDTH * 4


def test_a_forward_adds_the_input_of_each_layer():
    forwards = [point.live_bytes for point in report().memory_line if point.program == "2.forward"]
    by_hand = [held_beside_activations() + inputs * HIDDEN for inputs in range(1, LAYERS + 1)]
    assert forwards == pytest.approx(by_hand, rel=0.02)


def test_a_backward_adds_the_gradients_of_a_layer_and_drops_its_input():
    backwards = [point.live_bytes for point in report().memory_line if point.program == "2.backward"]
    layer, last = parameter_bytes(".layers.0."), parameter_bytes("lm_head", "model.norm")
    by_hand = [
        held_beside_activations() + last + done * layer + (LAYERS - done) * HIDDEN + HIDDEN  # and the incoming gradient
        for done in range(LAYERS)
    ]
    assert backwards == pytest.approx(by_hand, rel=0.02)


def test_the_peak_is_arguments_saved_values_and_temporaries():
    """In the backward of the first layer: all gradients but that of the embedding, and three hidden states."""
    gradients = parameter_bytes() - parameter_bytes("embed_tokens")
    tensors = held_beside_activations() + gradients + 3 * HIDDEN
    largest = next(p for p in report().programs if p.name == "2.backward")
    by_hand = tensors + largest.temp_bytes + largest.generated_code_bytes
    assert report().step_peak_bytes == pytest.approx(by_hand, rel=0.02)
