"""A model that is trained on eight devices, held against one device: eager PyTorch on the CPU, in float32.

What AdamW makes of rounding has another reference: the same model, compiled, whole on every device. AdamW moves a
parameter whose gradient is zero but for rounding by the learning rate. So two runs of the reference, the second with
the rows of its batches in reverse, tell how far from each other one device ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_xla
from torch_xla.debug import metrics

import kp_dynamo
from kp_dynamo.aot.tensor_plan import needed_plan
from kp_dynamo.api.models import move
from kp_dynamo.compat import xla
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import hlo_sharding
from kp_dynamo.sharding.rules import placements
from kp_dynamo.telemetry import snapshot
from tests.sharding.model_cases import MODELS, Batch, Case
from tests.sharding.registry import compiled, placed_as

STEPS = 20
Tensors = dict[str, torch.Tensor]
Optimizer = Callable[[Any, float], torch.optim.Optimizer]


@dataclass
class Trained:
    """What a training run leaves behind. `programs` counts those that kp_tpu compiled in each step; `compiled`, all."""

    gradients: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    parameters: Tensors = field(default_factory=dict)
    programs: list[int] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)
    misplaced: list[str] = field(default_factory=list)


def _copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _num_compiled() -> int:
    return (metrics.metric_data("CompileTime") or (0,))[0]


def train(model: Any, run: Any, batch_of: Callable[[int], Batch], optimizer: Any, steps: int = STEPS) -> Trained:
    """A step for each batch."""
    found, on_device = Trained(), next(model.parameters()).device.type == "xla"
    for step in range(steps):
        before = snapshot()["programs"], _num_compiled()
        optimizer.zero_grad()
        loss = run(**batch_of(step)).loss
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if on_device and step == 1:
            found.misplaced += [n for n, p in model.named_parameters() if placed_as(gradients[n]) != placed_as(p)]
        found.gradients = found.gradients or _copies(gradients)
        optimizer.step()
        if on_device:
            torch_xla.sync()
        found.losses.append(loss.item())
        found.programs.append(snapshot()["programs"] - before[0])
        found.compiled.append(_num_compiled() - before[1])
    state = {n: s["exp_avg"] for n, p in model.named_parameters() if "exp_avg" in (s := optimizer.state[p])}
    if on_device:
        parameters = dict(model.named_parameters())
        found.misplaced += [name for name, value in state.items() if placed_as(value) != placed_as(parameters[name])]
    found.parameters = _copies({**dict(model.named_parameters()), **dict(model.named_buffers())})
    return found


def adamw(model: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def sgd(model: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=10 * lr)


@functools.cache
def in_eager(name: str, optimizer: Optimizer, steps: int = STEPS) -> Trained:
    case = MODELS[name]
    model = case.make()
    return train(model, model, case.batch, optimizer(model, case.lr), steps)


@functools.cache
def whole(name: str, *, is_permuted: bool = False) -> Trained:
    """Trained by AdamW, compiled, without a sharding: every device computes the same."""
    case = MODELS[name]
    model = move(case.make(), xla.device())

    def batch_of(step: int) -> Batch:
        return {key: (value.flip(0) if is_permuted else value).to("xla") for key, value in case.batch(step).items()}

    return train(model, compiled(model), batch_of, adamw(model, case.lr))


def distance(found: Tensors, expected: Tensors) -> float:
    """The norm of the difference over all tensors, over that of `expected`."""
    pairs = [(found[name].double(), value.double()) for name, value in expected.items()]
    return (sum(float((a - b).pow(2).sum()) for a, b in pairs) / sum(float(b.pow(2).sum()) for _, b in pairs)) ** 0.5


def farthest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def divided(case: Case, how: str) -> tuple[Any, dict[str, str]]:
    """The model on all devices, and how each parameter is to lie."""
    mesh, sharding = case.shardings[how]
    model, named = case.make(), NamedMesh.of(mesh)
    example = None if case.example is None else case.example(case.batch(0))
    kp_dynamo.shard(model, mesh, sharding, example_args=example)
    plan = needed_plan(model, example, named, sharding)
    return model, {n: hlo_sharding(p, named, len(p)) for n, p in placements(model, named, sharding, plan).items()}


@dataclass
class InParts:
    """How a divided model was trained, what did not stay where it was placed, and how many parameters are divided."""

    found: Trained
    moved: list[str]
    divided: int


def in_parts(name: str, how: str, optimizer: Optimizer, steps: int = STEPS, **options: Any) -> InParts:
    case = MODELS[name]
    model, wanted = divided(case, how)

    def batch_of(step: int) -> Batch:
        return kp_dynamo.shard_batch(case.batch(step), case.shardings[how][0])

    found = train(model, compiled(model, **options), batch_of, optimizer(model, case.lr), steps)
    moved = [name for name, p in model.named_parameters() if placed_as(p) != wanted[name]]
    return InParts(found, moved, sum(text != "{replicated}" for text in wanted.values()))


def against_eager(name: str, how: str, steps: int = STEPS, **options: Any) -> tuple[InParts, dict[str, Any]]:
    """Differences of gradients and losses under AdamW, and what lies where."""
    mine, expected = in_parts(name, how, adamw, steps, **options), in_eager(name, adamw, steps)
    return mine, {
        "gradients": distance(mine.found.gradients, expected.gradients),
        "loss": farthest(mine.found.losses, expected.losses),
        "losses": mine.found.losses,
        "misplaced": mine.found.misplaced,
        "moved": mine.moved,
        "divided": mine.divided,
        "programs": mine.found.programs,
        "compiled": mine.found.compiled,
    }


def against_one_device(name: str, how: str, **options: Any) -> dict[str, Any]:
    """The same, and the parameters at the end, under SGD too."""
    mine, answer = against_eager(name, how, **options)
    by_sgd, alone, permuted = in_parts(name, how, sgd, **options), whole(name), whole(name, is_permuted=True)
    return answer | {
        "adamw": distance(mine.found.parameters, alone.parameters),
        "adamw_permuted": distance(permuted.parameters, alone.parameters),
        "sgd": distance(by_sgd.found.parameters, in_eager(name, sgd).parameters),
        "programs_of_one": alone.programs,
    }
