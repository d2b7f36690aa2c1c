"""`checkpoint="auto"`: recompute as much as is needed to fit the budget, and no more."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from kp_dynamo.graph.nodes import gradients_by_input
from kp_dynamo.graph.peak_memory import code_bytes, peak_memory
from kp_dynamo.graph.saved_values import ForwardPart, partitioned, saved_by_min_cut
from kp_dynamo.graph.sizes import node_bytes
from kp_dynamo.graph.step_share import WHOLE, StepShare
from kp_dynamo.passes.base import PassReport, Refusal, reported
from kp_dynamo.passes.gate_recomputation import GateRecomputation
from kp_dynamo.passes.recompute.policies import FreedValue, cheapest_first, residual_sums
from kp_dynamo.passes.recompute.tags import tag_recompute, untag

# How much the estimate of the peak may fall short: see docs/measurements.md.
MARGIN = 0.25
_MIB = 2**20


class BudgetError(Exception):
    """The smallest programs that "auto" finds exceed a budget that the user gave."""


@dataclass(frozen=True)
class Budget:
    """The budget that "auto" has to fit.

    Attributes:
        num_bytes: Memory of the chip that may be used.
        optimizer_state_factor: Bytes of optimizer state, in addition to the programs, per byte of a trainable
            parameter.
        vmem_bytes: Vector memory of the chip.
        narrow_matmuls: Whether matmuls read float32 operands as bfloat16.
        is_hard_limit: Whether to raise if nothing fits; otherwise the best attempt stays.
        share: What a piece of a divided graph gets of this memory.
    """

    num_bytes: float
    optimizer_state_factor: float
    vmem_bytes: int
    narrow_matmuls: bool
    is_hard_limit: bool
    share: StepShare = WHOLE


def fitted(gm: fx.GraphModule, name: str, budget: Budget) -> PassReport:
    """Tag a joint graph so that its programs fit the budget.

    Raises:
        BudgetError: They cannot fit, and the budget is a hard limit.
    """
    state = budget.optimizer_state_factor * _trainable_bytes(gm.graph)
    room = (budget.share.of(budget.num_bytes) - state) * (1 - MARGIN)
    if _all_bytes(gm.graph) <= room:
        return PassReport(name, 0)
    before = _peak(gm, budget)
    given = _available(room, state, budget)
    if before <= room:
        return PassReport(name, 0, notes=(f"nothing is recomputed: {before / _MIB:.1f} MiB by estimate, {given}",))
    attempt = _Attempt(gm, budget)
    least = attempt.find(before, room)
    # The share of a piece is what it may save. While it runs, it may take what no other piece saves.
    held = budget.share.activation_bytes(least, attempt.saved_bytes())
    needed = budget.share.outside_bytes + state + held / (1 - MARGIN)
    fits = least <= room or needed <= budget.num_bytes
    if not fits and budget.is_hard_limit:
        raise BudgetError(
            f"even with recomputation the programs take {least / _MIB:.1f} MiB by estimate, "
            f"and {given}. The smallest sufficient budget is {_rounded_up_gb(needed):.3f} GB"
        )
    note = (
        f"{attempt.freed_bytes / _MIB:.1f} MiB are recomputed, {attempt.flops / 1e9:.2f} GFLOP: by estimate "
        f"{before / _MIB:.1f} -> {least / _MIB:.1f} MiB, {given}"
    )
    refused = [] if fits else [Refusal(gm.graph.output_node(), f"does not fit: {note}")]
    return PassReport(name, attempt.num_tagged, reported(refused), (note,))


def _available(room: float, state: float, budget: Budget) -> str:
    """What the programs may use, in words."""
    if room > 0:
        return f"{room / _MIB:.1f} MiB are available in addition to {state / _MIB:.1f} MiB of optimizer state"
    step_bytes = budget.share.outside_bytes + budget.share.inside_bytes
    held = "parameters, gradients, optimizer states and inputs" if step_bytes else "the states of the optimizer"
    return (
        f"{held} alone, {max(step_bytes, state) / _MIB:.1f} MiB, leave nothing of the "
        f"{budget.num_bytes / _MIB:.1f} MiB that the step may use"
    )


def _rounded_up_gb(num_bytes: float) -> float:
    """Gigabytes, rounded up to whole megabytes: the figure in the message must itself be enough."""
    return math.ceil(num_bytes / 1e6) / 1e3


class _Attempt:
    """Drops saved values, cheapest first, until the estimate fits; leaves the tags of the last try."""

    def __init__(self, gm: fx.GraphModule, budget: Budget) -> None:
        self._gm, self._budget = gm, budget
        part = ForwardPart(gm.graph, saved_by_min_cut(gm))
        ends = set(residual_sums(part.nodes))
        self._steps = list(cheapest_first(part, lambda n: n in ends))
        self._taken: list[FreedValue] = []
        self._tagged: list[fx.Node] = []

    @property
    def num_tagged(self) -> int:
        return len(self._tagged)

    @property
    def freed_bytes(self) -> int:
        return sum(s.freed_bytes for s in self._taken)

    @property
    def flops(self) -> int:
        return sum(s.flops for s in self._taken)

    def saved_bytes(self) -> int:
        """What the forward saves with these tags."""
        return ForwardPart(self._gm.graph, saved_by_min_cut(self._gm)).saved_bytes()

    def find(self, before: int, room: float) -> int:
        """The estimate of the first try that fits, or the smallest one."""
        wanted = before - room
        tries: dict[int, int] = {}
        while (count := self._how_many(wanted)) not in tries:
            tries[count] = self._try(count)
            if tries[count] <= room:
                return tries[count]
            wanted = sum(s.freed_bytes for s in self._steps[:count]) + max(tries[count] - room, self._next(count))
        best = min(tries, key=lambda n: (tries[n], n))
        return self._try(best)

    def _how_many(self, wanted: float) -> int:
        """The number of first steps that free the wanted bytes, or of all steps."""
        freed = 0
        for count, step in enumerate(self._steps, start=1):
            freed += step.freed_bytes
            if freed >= wanted:
                return count
        return len(self._steps)

    def _next(self, count: int) -> int:
        return self._steps[count].freed_bytes if count < len(self._steps) else 0

    def _try(self, count: int) -> int:
        """Replace the tags by those of the first steps; return the estimate."""
        untag(self._tagged)
        self._taken = self._steps[:count]
        self._tagged = tag_recompute(self._taken)
        return _peak(self._gm, self._budget)


def _all_bytes(joint: fx.Graph) -> int:
    """The memory of a graph that frees nothing: more than any of its programs takes."""
    return sum(node_bytes(n) for n in joint.nodes if n.op != "output") + code_bytes(joint)


def _peak(gm: fx.GraphModule, budget: Budget) -> int:
    """The estimated peak of the larger program."""
    forward, backward = partitioned(gm)
    GateRecomputation()(backward)
    return max(
        peak_memory(g.graph, budget.vmem_bytes, narrow_matmuls=budget.narrow_matmuls).total for g in (forward, backward)
    )


def _trainable_bytes(joint: fx.Graph) -> int:
    """Bytes of the inputs for which a joint graph returns a gradient."""
    return sum(map(node_bytes, gradients_by_input(joint)))
