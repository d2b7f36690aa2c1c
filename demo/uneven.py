"""The demo's second act: fine-tuning on texts of uneven length, padded to planned buckets."""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

import kp_dynamo
from demo.model import next_byte_loss
from demo.text import Corpus
from demo.training import Training
from kp_dynamo.telemetry import counters as telemetry

MAX_LENGTH, NUM_PROGRAMS, RATE = 256, 3, 1e-4
_PARAGRAPH = re.compile(rb"\S.*?\n(?=\n|\Z)", re.DOTALL)


def paragraphs(text: Tensor, num: int) -> list[Tensor]:
    """The first `num` pieces between blank lines of 16 to `MAX_LENGTH` bytes, each int64 [T + 1]."""
    pieces = (m.group() for m in _PARAGRAPH.finditer(bytes(text.tolist())))
    fitting = [p for p in pieces if 16 <= len(p) <= MAX_LENGTH][:num]
    return [torch.tensor(list(piece)) for piece in fitting]


def fine_tune(training: Training, corpus: Corpus, num_steps: int) -> str:
    """Train on one paragraph after the other and return a summary as text."""
    pieces = paragraphs(corpus.held_out, num_steps)
    lengths = [len(p) - 1 for p in pieces]
    plan = kp_dynamo.plan_buckets(lengths, NUM_PROGRAMS)
    options = {**training.way.options, "buckets": list(plan.buckets), "checkpoint": "auto"}
    loss_of = torch.compile(partial(next_byte_loss, training.model), backend="kp_tpu", options=options)
    optimizer = torch.optim.SGD(training.model.parameters(), RATE)
    before, losses = telemetry.snapshot(), list[float]()
    for piece in tqdm(pieces, desc="fine-tuning", leave=False):
        # Slice on the host: on the device this would compile a program per length.
        rows = (part.unsqueeze(0).to(training.way.device) for part in (piece[:-1], piece[1:]))
        tokens, targets = (kp_dynamo.mark_sequence(row, 1) for row in rows)
        loss = loss_of(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _summary(plan, lengths, losses, before)


def _summary(plan: kp_dynamo.BucketPlan, lengths: list[int], losses: list[float], before: dict[str, int]) -> str:
    done = telemetry.snapshot()
    counted = {name: done[name] - before[name] for name in ("programs", "bucket_refusals", "aot_traces")}
    return "\n".join(
        [
            str(plan),
            f"{len(lengths)} texts of {len(set(lengths))} lengths from {min(lengths)} to {max(lengths)}: "
            f"AOTAutograd ran {counted['aot_traces']} times (once for each piece of the model),",
            f"{counted['programs']} programs (a forward and a backward for each piece and bucket), "
            f"{counted['bucket_refusals']} refused; mean loss {sum(losses) / len(losses):.2f}.",
        ]
    )
