"""Whether compiled training takes the same first steps as eager, up to rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tqdm import tqdm

from demo.text import Corpus
from demo.training import Training, Way

EAGER = Way("eager")
EXACT = Way("eager float64", dtype=torch.float64)
EAGER_BF16 = Way("eager autocast", is_autocast=True)
OURS_FLOAT32 = Way("kp_tpu float32", "kp_tpu", {"precision": "float32"})
OURS = Way("kp_tpu", "kp_tpu")

# Two programs with the same rounding have similar errors, up to randomness and the order of their sums. The factor
# covers the randomness: Adam divides by the size of a gradient, so a rounding error can grow from step to step.
SAFETY = 8.0


@dataclass(frozen=True)
class Verdict:
    """The largest difference from eager, and what rounding explains of it."""

    name: str
    difference: float
    allowed: float

    @property
    def is_met(self) -> bool:
        return self.difference <= self.allowed  # False for NaN, too

    def __str__(self) -> str:
        word = "agrees" if self.is_met else "DISAGREES"
        return f"{self.name:<15} {word}: largest difference {self.difference:.1e}, rounding explains {self.allowed:.1e}"


def first_losses(way: Way, corpus: Corpus, num_steps: int, num_first: int) -> list[float]:
    """The losses of the first steps of a training that would be `num_steps` long."""
    training = Training(way, corpus, num_steps)
    for _ in tqdm(range(num_first), desc=f"first steps, {way.name}", leave=False):
        training.step()
    return training.losses


def verdicts(losses: dict[str, list[float]]) -> list[Verdict]:
    """Both compiled runs against eager float32.

    Rounding is measured, not assumed: it is how far eager of the same precision (float32, or autocast to bfloat16)
    lies from eager float64 over the same steps. A compiled run may lie `SAFETY` times that from eager.
    """
    float32 = largest_difference(losses[EAGER.name], losses[EXACT.name])
    bfloat16 = largest_difference(losses[EAGER_BF16.name], losses[EXACT.name])
    rounding = ((OURS_FLOAT32, float32), (OURS, bfloat16))
    return [
        Verdict(way.name, largest_difference(losses[way.name], losses[EAGER.name]), SAFETY * spread)
        for way, spread in rounding
    ]


def largest_difference(left: list[float], right: list[float]) -> float:
    """The largest absolute difference over the steps; NaN if any loss is NaN."""
    return torch.tensor(left, dtype=torch.float64).sub(torch.tensor(right, dtype=torch.float64)).abs().max().item()


def table(losses: dict[str, list[float]]) -> str:
    """Step by step: eager, and the compiled runs with their difference from it."""
    header = f"{'step':>4} {'eager':>10} {OURS_FLOAT32.name:>15} {'difference':>11} {OURS.name:>10} {'difference':>11}"
    columns = zip(losses[EAGER.name], losses[OURS_FLOAT32.name], losses[OURS.name], strict=True)
    lines = [
        f"{number:>4} {eager:>10.6f} {float32:>15.6f} {float32 - eager:>+11.1e} {ours:>10.6f} {ours - eager:>+11.1e}"
        for number, (eager, float32, ours) in enumerate(columns, start=1)
    ]
    return "\n".join([header, *lines])
