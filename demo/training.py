"""One training run: the same model, batches and optimizer in eager, through kp_tpu or through stock openxla."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch_xla

from demo.model import Gpt, next_byte_loss
from demo.text import Corpus, batch_at

SEED = 0
NUM_ROWS, CONTEXT = 4, 256
PEAK_RATE, NUM_WARM_UP = 1e-3, 20


@dataclass(frozen=True)
class Way:
    """How a run computes: eager on the CPU if `backend` is None, else compiled on the XLA device."""

    name: str
    backend: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    is_autocast: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.backend is None else torch_xla.device()

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.backend is None:
            return function
        return torch.compile(function, backend=self.backend, options=self.options or None)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """torch's own mixed precision, if eager should compute in bfloat16."""
        return torch.autocast("cpu", torch.bfloat16) if self.is_autocast else contextlib.nullcontext()


class Training:
    """A fresh model and its optimizer; `step` trains on the next batch, which depends only on its number."""

    def __init__(self, way: Way, corpus: Corpus, num_steps: int) -> None:
        torch.manual_seed(SEED)
        self.way, self.corpus, self.num_steps, self.losses = way, corpus, num_steps, list[float]()
        self.model = Gpt().to(way.dtype).to(way.device)
        # A tensor on the device: a Python number would be compiled into the program as a constant.
        self.rate = torch.tensor(PEAK_RATE, device=way.device)
        is_compiled = way.backend is not None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), self.rate, (0.9, 0.95), weight_decay=0.01, foreach=False, capturable=is_compiled
        )
        self._loss = way.compiled(partial(next_byte_loss, self.model))
        self._update = way.compiled(self.optimizer.step)

    def step(self) -> float:
        """Forward, backward and update; the loss in nats per byte."""
        number = len(self.losses)
        self.rate.fill_(learning_rate(number, self.num_steps))
        tokens, targets = (t.to(self.way.device) for t in batch_at(self.corpus.train, number, NUM_ROWS, CONTEXT))
        with self.way.precision():
            loss = self._loss(tokens, targets)
        loss.backward()
        self._update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
        return self.losses[-1]

    def finish(self) -> None:
        """Wait for the last update, because XLA runs asynchronously."""
        next(self.model.parameters()).detach().flatten()[:1].cpu()


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then constant, then linear decay to zero over the last two thirds."""
    warm_up = (step + 1) / NUM_WARM_UP
    decay = (num_steps - step) / (num_steps * 2 / 3)
    return PEAK_RATE * max(0.0, min(1.0, warm_up, decay))
