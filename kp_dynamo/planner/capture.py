"""The graphs of a step for a batch of two, taken once for each checkpoint mode.

What scales with the batch then divides in two, which shows how much memory each sequence takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kp_dynamo.aot.resized_inputs import resized
from kp_dynamo.aot.step_graphs import StepGraphs, graphs_of_step

BATCH = 2
"""Samples of a capture: the smallest batch whose dimension is not of size 1, which broadcasts."""


def capture_step(model: Any, args: Sequence[Any], options: dict[str, Any], train: bool) -> StepGraphs:
    """Take the graphs of a step; the arguments and errors are those of `graphs_of_step`."""
    return graphs_of_step(model, resized(args, BATCH), options, train)
