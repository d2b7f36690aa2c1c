"""The errors of a search without a result: which bound says so, and the nearest thing that fits."""

from __future__ import annotations

from dataclasses import replace

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUBackendError, TPUConfigurationError, TPUOutOfMemoryError
from kp_dynamo.hardware import CHIPS, GB, memory_budget_bytes
from kp_dynamo.planner.candidates import sold
from kp_dynamo.planner.fact_source import FactSource
from kp_dynamo.planner.request import PlanRequest
from kp_dynamo.planner.search import Bounded, Found, search

_MOST_CHIPS = 1024
_ALL_TARGETS = ("v5e", "v6e", "v4", "v5p")


def nothing_found(request: PlanRequest, source: FactSource, found: Found) -> TPUBackendError:
    """Why no candidate is left."""
    goal = request.goal
    where = f"up to {goal.max_chips} chips of {', '.join(goal.targets)}"
    if found.fastest is not None and (hours := request.hours(found.fastest.seconds_per_sample)) is not None:
        return TPUConfigurationError(
            f"deadline_hours={goal.deadline_hours:g} is invalid: on {where}, training takes at least {hours:.3g} hours "
            f"({_described(found.fastest)}). Try: a later deadline, more chips, or other targets."
        )
    if found.least is None:
        return TPUConfigurationError(
            f"a step of {request.step_samples:g} samples cannot be divided among the chips: {where}. Try: more tokens "
            "a step, or a target with smaller slices."
        )
    least, target = found.least.memory, found.least.candidate.layout.topology.target
    each, beside = CHIPS[target].device_word, "and" if least.is_added else "or"
    return TPUOutOfMemoryError(
        f"the model fits nowhere on {where}. By its lower bound, it takes at least {least.total / GB:.2f} GB a {each} "
        f"({_described(found.least)}): parameters {least.parameters / GB:.2f}, optimizer state "
        f"{least.optimizer / GB:.2f}, inputs {least.inputs / GB:.2f}, activations {least.activations / GB:.2f} "
        f"{beside} gradients {least.gradients / GB:.2f}. Allowed: "
        f"{request.budgets[target] / GB:.2f} GB. "
        f"The nearest thing that fits, by its bound: {_nearest(request, source)}."
    )


def _nearest(request: PlanRequest, source: FactSource) -> str:
    """The smallest slices that fit, of the same targets and of the others."""
    budgets, targets = {}, _suggested(request)
    for target in targets:
        options = CompileOptions.from_dict({**request.options, "target": target})
        budgets[target] = memory_budget_bytes(options.chip, options.memory_fraction, options.memory_budget_gb)
    wider = replace(request, budgets=budgets, goal=replace(request.goal, deadline_hours=None))
    fits = []
    for target in targets:
        for topology in sold(target, _MOST_CHIPS):
            found = search(wider, source, [topology])
            if found.fitting:
                fits.append(found.fitting[0])
                break
    if not fits:
        step = f"with {request.step_samples:g} samples a step"
        return f"none up to {_MOST_CHIPS} chips of {', '.join(targets)}, {step}"
    fits.sort(key=lambda b: (b.candidate.layout.topology.target not in request.goal.targets, _chips(b)))
    return "; ".join(_described(b) for b in fits[:2])


def _suggested(request: PlanRequest) -> tuple[str, ...]:
    """All targets whose compiler is installed with the package, and what was asked for."""
    return (*_ALL_TARGETS, *(target for target in request.goal.targets if target not in _ALL_TARGETS))


def _chips(bounded: Bounded) -> int:
    return bounded.candidate.layout.topology.num_chips


def _described(bounded: Bounded) -> str:
    candidate = bounded.candidate
    layout = candidate.layout
    how = f", mesh {layout.mesh}, sharding {layout.sharding}" if layout.sharding else ""
    where = f"{layout.topology.num_chips} {layout.topology.target}{how}"
    return f"{where}, batch {candidate.batch}, checkpoint {candidate.checkpoint}"
