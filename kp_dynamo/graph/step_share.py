"""What a graph is of a training step, and the memory that it may use so that the whole step fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["step", "layer", "rest"]


@dataclass(frozen=True)
class StepShare:
    """What a piece gets of a memory budget. A whole graph gets all of it.

    Attributes:
        scope: The whole step, a repeated layer, or what precedes and follows the layers.
        outside_bytes: Parameters, gradients, optimizer state and inputs of the step that the piece does not read.
        inside_bytes: The same of those that it reads.
        fraction: The share of the memory for activations that one run of the piece gets.
    """

    scope: Scope = "step"
    outside_bytes: float = 0.0
    inside_bytes: float = 0.0
    fraction: float = 1.0

    def of(self, budget_bytes: float) -> float:
        """Bytes that the piece may use if the step may use `budget_bytes`."""
        activations = budget_bytes - self.outside_bytes - self.inside_bytes
        return self.inside_bytes + activations * self.fraction

    def budget_for(self, num_bytes: float) -> float:
        """The budget of a step in which the piece may use `num_bytes`: the inverse of `of`."""
        return self.outside_bytes + self.inside_bytes + (num_bytes - self.inside_bytes) / self.fraction


WHOLE = StepShare()
