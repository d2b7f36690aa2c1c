"""What dividing a capture costs beside its step, by the figures of `blocks/policy.py`."""

from __future__ import annotations

from kp_dynamo.blocks.division import Division
from kp_dynamo.blocks.policy import (
    MAX_HOST_SHARE,
    XLA_CPU,
    Speed,
    host_seconds,
    speed_of,
    step_seconds,
    transfer_seconds,
)
from kp_dynamo.compat import chips
from kp_dynamo.session.compile_plan import CompilePlan


class DivisionCost:
    """The host time of the calls of a divided graph, beside the time of a step.

    Args:
        one: The division into single layers.
        plan: How it is compiled.
    """

    def __init__(self, one: Division, plan: CompilePlan) -> None:
        self._trains, self._is_for_bounds = plan.capture.records_gradients, plan.options.is_for_bounds
        pieces = ((piece.effects, piece.runs) for piece in one.pieces)
        of_one_chip = step_seconds(pieces, speed_for(plan), trains=self._trains)
        self._step = of_one_chip / plan.options.spread.num_chips
        crosses = self._trains and plan.capture.mode == "cpu"
        self._transfer = transfer_seconds(one.passed_bytes) / len(one.schedule.steps) if crosses else 0.0

    def is_small(self, num_steps: int) -> bool:
        """Whether so many calls of programs are cheap; for bounds always, because larger batches take longer."""
        return self._is_for_bounds or self._host(num_steps) <= MAX_HOST_SHARE * self._step

    def text(self, num_steps: int) -> str:
        """Why so many calls do not pay."""
        return (
            f"{num_steps} calls in place of one add {self._host(num_steps) * 1e3:.1f} ms of host time to a step of "
            f"{self._step * 1e3:.1f} ms, more than {MAX_HOST_SHARE:.0%}"
        )

    def _host(self, num_steps: int) -> float:
        return host_seconds(num_steps, trains=self._trains) + num_steps * self._transfer


def speed_for(plan: CompilePlan) -> Speed:
    """How fast the device of a capture computes: the one that is there, or the target."""
    is_on_cpu = plan.capture.mode != "fake" and chips.chip_name() is None
    return XLA_CPU if is_on_cpu else speed_of(plan.options.chip)
