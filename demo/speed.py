"""Milliseconds of a training step: kp_tpu, stock openxla and eager, in turns."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from tqdm import tqdm

from demo.agreement import EAGER, OURS
from demo.text import Corpus
from demo.training import Training, Way

OPENXLA = Way("openxla", "openxla")
NUM_ROUNDS = 7


@dataclass(frozen=True)
class Speed:
    """Seconds of the first step, with whatever it compiles, and the median of later ones in milliseconds."""

    first_s: float
    step_ms: float


def measure(corpus: Corpus) -> dict[str, Speed]:
    """Measure new trainings of each kind. Dynamo is reset, so kp_tpu shows its cache hits on an equal model."""
    torch._dynamo.reset()
    trainings = {way.name: Training(way, corpus, num_steps=NUM_ROUNDS + 2) for way in (EAGER, OPENXLA, OURS)}
    first = {name: _seconds(training) for name, training in trainings.items()}
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    for number in tqdm(range(NUM_ROUNDS), desc="timing", unit="round", leave=False):
        # Reverse every other round, so that none always runs after the same one.
        for name in list(trainings)[:: 1 if number % 2 == 0 else -1]:
            taken[name].append(_seconds(trainings[name]) * 1e3)
    return {name: Speed(first[name], median(taken[name])) for name in trainings}


def _seconds(training: Training) -> float:
    start = time.perf_counter()
    training.step()
    training.finish()
    return time.perf_counter() - start
