"""A divided Llama or GPT-2 with other options and habits of training, against eager PyTorch on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch_xla
from torch import nn

import kp_dynamo
from kp_dynamo.api.models import move
from kp_dynamo.compat import xla
from kp_dynamo.telemetry import snapshot
from tests.sharding.like_one_device import divided, placed_as
from tests.sharding.model_cases import GPT2_WITH_DROPOUT, MODELS, Batch
from tests.sharding.registry import compiled, slow_check

Losses = list[float]
Run = Callable[..., Any]


def llama(how: str, **options: Any) -> tuple[nn.Module, Run, dict[str, int]]:
    case = MODELS["llama"]
    model = divided(case, how)[0]
    return model, compiled(model, **options), case.shardings[how][0]


def differences(found: Losses, expected: Losses, model: nn.Module, eager: nn.Module) -> dict[str, float]:
    """The largest relative difference of two losses, and the largest of two elements of a parameter."""
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)),
        "parameters": max((a.detach().cpu() - b.detach()).abs().max().item() for a, b in pairs),
    }


def trained(model: nn.Module, run: Run, batches: Iterable[Batch], mesh: Any = None, micro_batches: int = 1) -> Losses:
    """By SGD; each batch in `micro_batches` backwards."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        for part in range(micro_batches):
            rows = {key: value[part::micro_batches] for key, value in batch.items()}
            loss = run(**(rows if mesh is None else kp_dynamo.shard_batch(rows, mesh))).loss
            (loss / micro_batches).backward()
            losses.append(loss.item())
        optimizer.step()
        if mesh is not None:
            torch_xla.sync()
    return losses


def against_eager(how: str, batches: list[Batch], micro_batches: int = 1, **options: Any) -> dict[str, Any]:
    eager, (model, run, mesh) = MODELS["llama"].make(), llama(how, **options)
    before = snapshot()["programs"]
    found = trained(model, run, batches, mesh, micro_batches)
    num_programs = snapshot()["programs"] - before
    return {
        "programs": num_programs,
        **differences(found, trained(eager, eager, batches, micro_batches=micro_batches), model, eager),
    }


def batches(*rows: int, lengths: tuple[int, ...] = (16,)) -> list[Batch]:
    found = []
    for step, (count, length) in enumerate((count, length) for count in rows for length in lengths):
        ids = MODELS["llama"].batch(step, count)["input_ids"][:, :length]
        found.append({"input_ids": ids, "labels": ids})
    return found


@slow_check
def batches_that_do_not_divide() -> Any:
    return [against_eager(how, batches(8, 10, 7, 3, 8)) for how in ("data", "fsdp", "tensor", "both")]


@slow_check
def lengths_in_buckets() -> Any:
    """One program for all lengths but the first, which Dynamo takes for a constant."""
    answers = []
    for how in ("fsdp", "both"):
        torch._dynamo.reset()
        answers.append(against_eager(how, batches(8, lengths=(9, 12, 16, 5, 11)), buckets=[16]))
    return answers


@slow_check
def recomputation() -> Any:
    return [against_eager(how, batches(8, 8, 8), checkpoint="blocks") for how in ("fsdp", "both")]


@slow_check
def blocks_with_recomputation() -> Any:
    return against_eager("both", batches(8, 8, 8), checkpoint="blocks", blocks="on")


@slow_check
def backwards_that_accumulate() -> Any:
    return [against_eager(how, batches(16, 20, 16), micro_batches=2) for how in ("fsdp", "both")]


@slow_check
def a_compiled_optimizer_that_donates() -> Any:
    """Its losses and parameters, how many buffers it donated, and what does not lie as its parameter."""
    eager, (model, run, mesh) = MODELS["llama"].make(), llama("both", donate="mutated")
    # A gradient of zero moves a parameter by lr without a large eps.
    mine = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="xla"), eps=1e-3, capturable=True)
    theirs, before = torch.optim.AdamW(eager.parameters(), lr=1e-3, eps=1e-3), snapshot()["donated_buffers"]
    step = torch.compile(mine.step, backend="kp_tpu", options={"donate": "mutated", "precision": "float32"})
    found, expected = [], []
    for batch in batches(8, 8, 8, 8):
        for model_run, rows, losses in ((run, kp_dynamo.shard_batch(batch, mesh), found), (eager, batch, expected)):
            loss = model_run(**rows).loss
            loss.backward()
            losses.append(loss.item())
        step()
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    state = [(p, mine.state[p]["exp_avg"]) for p in model.parameters()]
    misplaced = sum(placed_as(value) != placed_as(p) for p, value in state)
    donated = snapshot()["donated_buffers"] - before
    return {"donated": donated, "misplaced": misplaced, **differences(found, expected, model, eager)}


@slow_check
def dropout() -> Any:
    """The largest difference of a loss and of a gradient to a model that is whole on each device, with equal seeds."""
    answers = []
    for how in ("fsdp", "both"):
        case, results = GPT2_WITH_DROPOUT, []
        for model in (move(case.make(), xla.device()), divided(case, how)[0]):
            torch._dynamo.reset()
            torch.manual_seed(7)
            run, losses = compiled(model), []
            for step in range(2):
                loss = run(**{key: value.to("xla") for key, value in case.batch(step).items()}).loss
                loss.backward()
                losses.append(loss.item())
            results.append((losses, [p.grad.cpu() for p in model.parameters()]))
        (losses, gradients), (found, mine) = results
        loss = max(abs(a - b) for a, b in zip(found, losses, strict=True))
        answers.append([loss, max((a - b).abs().max().item() for a, b in zip(mine, gradients, strict=True))])
    return answers


def file_of_a_checkpoint() -> Path:
    return Path(os.environ["KP_TEST_CHECKPOINT"])


def continued(model: nn.Module, run: Run, optimizer: torch.optim.Optimizer, steps: range, mesh: Any = None) -> Losses:
    """The losses of these steps of AdamW."""
    losses = []
    for step in steps:
        batch = MODELS["llama"].batch(step)
        optimizer.zero_grad()
        loss = run(**(batch if mesh is None else kp_dynamo.shard_batch(batch, mesh))).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@slow_check
def save_in_the_middle() -> Any:
    model, run, mesh = llama("both")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = continued(model, run, optimizer, range(3), mesh)
    kp_dynamo.save_checkpoint(file_of_a_checkpoint(), model, optimizer, step=3)
    return before + continued(model, run, optimizer, range(3, 6), mesh)


@slow_check
def load_in_the_middle() -> Any:
    """Into two shardings: the losses, and what does not lie as before, or as its parameter."""
    answers = []
    for how in ("fsdp", "both"):
        torch._dynamo.reset()
        model, run, mesh = llama(how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wanted = [placed_as(p) for p in model.parameters()]
        kp_dynamo.load_checkpoint(file_of_a_checkpoint(), model, optimizer)
        losses = continued(model, run, optimizer, range(3, 6), mesh)
        placed = [placed_as(p) for p in model.parameters()]
        state = [placed_as(optimizer.state[p]["exp_avg"]) for p in model.parameters()]
        misplaced = sum(place != want for place, want in zip(placed + state, wanted + wanted, strict=True))
        answers.append([losses, misplaced])
    return answers


@slow_check
def a_compiled_optimizer_whose_state_was_loaded() -> Any:
    """The state, before and after a step, that does not lie as its parameter."""
    folder, states = file_of_a_checkpoint(), []
    for is_loaded in (False, True):
        torch._dynamo.reset()
        model, run, mesh = llama("fsdp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True, capturable=True)
        if is_loaded:
            kp_dynamo.load_checkpoint(folder, model, optimizer)
            states.append([placed_as(optimizer.state[p]["exp_avg"]) for p in model.parameters()])
        step = torch.compile(optimizer.step, backend="kp_tpu", options={"precision": "float32"})
        run(**kp_dynamo.shard_batch(MODELS["llama"].batch(0), mesh)).loss.backward()
        step()
        kp_dynamo.save_checkpoint(folder, model, optimizer, step=1)
    states.append([placed_as(optimizer.state[p]["exp_avg"]) for p in model.parameters()])
    wanted = [placed_as(p) for p in model.parameters()]
    return [sum(place != want for place, want in zip(found, wanted, strict=True)) for found in states]
