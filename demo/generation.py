"""Text from the trained model, and its loss on held-out text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from demo.text import Corpus, batch_at
from demo.training import CONTEXT, Training

PROMPT = "def read_lines(path):\n    "
NUM_HELD_OUT = 32
TEMPERATURE = 0.6


class Reader:
    """The compiled model without gradients, always on one row of `CONTEXT` bytes, so that one program suffices."""

    def __init__(self, training: Training) -> None:
        self._model, self._device = training.way.compiled(training.model.eval()), training.way.device

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Bytes [T] with T <= CONTEXT -> logits [T, 256] on the CPU; attention is causal, so padding has no effect."""
        padded = F.pad(tokens, (0, CONTEXT - len(tokens)))
        return self._model(padded[None].to(self._device))[0].cpu()[: len(tokens)]


def held_out_loss(reader: Reader, corpus: Corpus) -> float:
    """Nats per byte, mean over `NUM_HELD_OUT` windows."""
    rows, next_bytes = batch_at(corpus.held_out, 0, NUM_HELD_OUT, CONTEXT)
    losses = [F.cross_entropy(reader.logits(row), target) for row, target in zip(rows, next_bytes, strict=True)]
    return torch.stack(losses).mean().item()


def generate(reader: Reader, prompt: str, num_bytes: int) -> str:
    """`prompt` and what the model writes after it, drawn at `TEMPERATURE`."""
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor(list(prompt.encode()))
    for _ in tqdm(range(num_bytes), desc="writing", unit="B", leave=False):
        last = reader.logits(text[-CONTEXT:])[-1]
        drawn = torch.multinomial(F.softmax(last / TEMPERATURE, dim=-1), 1, generator=generator)
        text = torch.cat([text, drawn])
    return printable(bytes(text.tolist()))


def printable(text: bytes) -> str:
    """Decode UTF-8; invalid bytes and control characters become dots."""
    decoded = text.decode(errors="replace")
    return "".join(c if c == "\n" or (c.isprintable() and c != "\N{REPLACEMENT CHARACTER}") else "." for c in decoded)
