"""What a graph is of a training step, and the memory that it may use so that the whole step fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["step", "layer", "layers", "rest"]


@dataclass(frozen=True)
class StepShare:
    """What a piece gets of a memory budget. A whole graph gets all of it.

    Attributes:
        scope: The whole step, a repeated layer or several, or what precedes and follows the layers.
        outside_bytes: Parameters, gradients, optimizer state and inputs of the step that the piece does not read.
        inside_bytes: The same of those that it reads.
        fraction: The share of the memory for activations that one run of the piece gets.
        runs: How many times it runs. What all runs save is held at once, and only one run is computed at a time.
        others_bytes: What the other pieces save at least, over all of their runs.
    """

    scope: Scope = "step"
    outside_bytes: float = 0.0
    inside_bytes: float = 0.0
    fraction: float = 1.0
    runs: int = 1
    others_bytes: float = 0.0

    def of(self, budget_bytes: float) -> float:
        """Bytes that the piece may use if the step may use `budget_bytes`."""
        activations = budget_bytes - self.outside_bytes - self.inside_bytes
        return self.inside_bytes + activations * self.fraction

    def activation_bytes(self, peak_bytes: float, saved_bytes: float) -> float:
        """What the step holds while a run is at its peak, besides what the piece does not read.

        Args:
            peak_bytes: The peak of one run of the piece.
            saved_bytes: What a run saves for the backward, a part of that.
        """
        return peak_bytes + (self.runs - 1) * saved_bytes + self.others_bytes


WHOLE = StepShare()
