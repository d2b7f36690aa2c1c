"""The checked arguments of `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, prod
from typing import Any, Literal

from torch import nn

from kp_dynamo.aot.request import Machine, request_of, require_target
from kp_dynamo.aot.topologies import shapes_of
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError, TPUModelPreparationError
from kp_dynamo.hardware import memory_budget_bytes
from kp_dynamo.planner.batches import Samples, samples_of
from kp_dynamo.planner.candidates import TOLERANCE

Objective = Literal["cost", "time"]
OBJECTIVES = ("cost", "time")
CHECKPOINTS = ("off", "attention", "blocks")
"""The modes that are searched: between them, "auto" and shares keep more or fewer of the same values."""

_FIXED_OPTIONS = ("target", "lowering", "buckets")


@dataclass(frozen=True)
class Goal:
    """What to look for, and where: the arguments of `plan` that are not about the model.

    Attributes:
        targets: Generations of chips.
        max_chips: The most chips of a slice.
        tokens_per_step: Tokens of an optimizer step; None: the batch of the arguments.
        objective: "cost" for the lowest price of a token, "time" for the shortest time.
        deadline_hours: The most hours that all tokens may take; None: any.
        tokens: All tokens of the training; None: unknown.
    """

    targets: Sequence[str] = ("v5e", "v6e", "v5p")
    max_chips: int = 256
    tokens_per_step: float | None = None
    objective: Objective = "cost"
    deadline_hours: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Attributes:
        samples: What the arguments say about one sample.
        step_samples: Samples of an optimizer step, as asked for: tokens may be those of a part of a sample.
        options: The options that the user gave.
        checkpoints: The modes to search.
        budgets: For each target, the memory of a chip that a step may use; on v7, of a device.
    """

    model: nn.Module
    args: tuple[Any, ...]
    train: bool
    goal: Goal
    samples: Samples
    step_samples: float
    options: dict[str, Any]
    checkpoints: tuple[Any, ...]
    budgets: dict[str, float]
    state_factor: float

    def hours(self, seconds_per_sample: float) -> float | None:
        """Hours of the whole training; None if its tokens are unknown."""
        if self.goal.tokens is None:
            return None
        return seconds_per_sample * self.goal.tokens / self.samples.tokens / 3600

    def is_late(self, seconds_per_sample: float) -> bool:
        """Whether the whole training misses the deadline."""
        hours, deadline = self.hours(seconds_per_sample), self.goal.deadline_hours
        return hours is not None and deadline is not None and hours > deadline


def plan_request(model: Any, args: Any, train: bool, goal: Goal, options: Any) -> PlanRequest:
    """Check the arguments of `plan`.

    Raises:
        TPUConfigurationError: An unknown target or option, a number that is not positive, a target that does not come
            in so few chips.
        TPUModelPreparationError: The model is no module, or a tensor has no shape yet.
    """
    _check_goal(goal)
    if not isinstance(model, nn.Module):
        raise TPUModelPreparationError(
            f"model of type {type(model).__name__} is invalid. Allowed: a torch.nn.Module, whose parameters can be "
            "divided among chips."
        )
    given = CompileOptions.from_dict(options).given_values()
    fixed = next((name for name in _FIXED_OPTIONS if name in given), None)
    if fixed is not None:
        raise TPUConfigurationError(
            f"options={{{fixed!r}: {given[fixed]!r}}} is unsupported by plan. Allowed: options except "
            f"{', '.join(_FIXED_OPTIONS)}. Try: targets=[...] for the chips."
        )
    request_of(model, args, Machine(goal.targets[0]), given, "kp_tpu", train)
    samples, checked = samples_of(args), CompileOptions.from_dict(given)
    budgets = {}
    for target in goal.targets:
        chosen = CompileOptions.from_dict({**given, "target": target})
        budgets[target] = memory_budget_bytes(chosen.chip, chosen.memory_fraction, chosen.memory_budget_gb)
    modes = (given["checkpoint"],) if "checkpoint" in given else CHECKPOINTS if train else ("off",)
    step_samples = _step_samples(goal, samples)
    factor = checked.optimizer_state_factor
    return PlanRequest(model, tuple(args), train, goal, samples, step_samples, given, modes, budgets, factor)


def _check_goal(goal: Goal) -> None:
    if not isinstance(goal.targets, (list, tuple)) or len(set(goal.targets)) != len(goal.targets) or not goal.targets:
        raise TPUConfigurationError(
            f"targets={goal.targets!r} is invalid. Allowed: a list of different ones, such as ['v5e', 'v6e']."
        )
    for target in goal.targets:
        require_target(target)
    if goal.objective not in OBJECTIVES:
        raise TPUConfigurationError(f"objective={goal.objective!r} is invalid. Allowed: {', '.join(OBJECTIVES)}.")
    for name in ("max_chips", "tokens_per_step", "deadline_hours", "tokens"):
        _check_positive(name, getattr(goal, name))
    if goal.deadline_hours is not None and goal.tokens is None:
        raise TPUConfigurationError("deadline_hours needs tokens: the number of tokens to train in that time.")
    for target in goal.targets:
        least = min(map(prod, shapes_of(target)))
        if goal.max_chips < least:
            raise TPUConfigurationError(
                f"max_chips={goal.max_chips} is invalid for target={target!r}: its smallest slice has {least} chips. "
                f"Allowed: {least} or more. Try: leave {target} out of targets."
            )


def _check_positive(name: str, value: Any) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_valid = value is None if name != "max_chips" else False
    if name == "max_chips" and not isinstance(value, int):
        is_number = False
    if not is_valid and not (is_number and 0 < value < float("inf")):
        kind = "a whole number" if name == "max_chips" else "a number"
        raise TPUConfigurationError(f"{name}={value!r} is invalid. Allowed: {kind} > 0.")


def _step_samples(goal: Goal, samples: Samples) -> float:
    if goal.tokens_per_step is None and goal.tokens is None:
        return samples.batch
    if not samples.tokens:
        name = "tokens_per_step" if goal.tokens_per_step is not None else "tokens"
        raise TPUConfigurationError(
            f"{name} is invalid for this model: its first argument is no integer tensor, so nothing says how many "
            "tokens a sample has. Try: leave it out; a step then has the batch of args."
        )
    if goal.tokens_per_step is None:
        return samples.batch
    if goal.tokens_per_step < samples.tokens:
        raise TPUConfigurationError(
            f"tokens_per_step={goal.tokens_per_step:g} is invalid: one sample has {samples.tokens} tokens. Allowed: "
            f"{samples.tokens} or more."
        )
    wanted = goal.tokens_per_step / samples.tokens
    if abs(round(wanted) - wanted) > TOLERANCE * wanted:
        near = f"{floor(wanted) * samples.tokens} or {ceil(wanted) * samples.tokens}"
        raise TPUConfigurationError(
            f"tokens_per_step={goal.tokens_per_step:g} is invalid: no number of samples of {samples.tokens} tokens is "
            f"within a tenth of it. Try: {near}."
        )
    return wanted
