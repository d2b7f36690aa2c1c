"""Which arguments the call of a divided model divides, and what the model writes to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import BatchEncoding

import kp_dynamo
from tests.sharding.model_cases import MODELS
from tests.sharding.registry import DATA, check, compiled, slow_check, spec


class Notes(nn.Module):
    """Writes to a tensor, a list and a dict of its caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor, seen: list[Any], notes: dict[str, Any], mask: Any = None
    ) -> torch.Tensor:
        h = self.linear(x)
        state[:, 1:].add_(h.detach()[:, 1:])
        seen.append(x)
        notes["h"] = h
        return h


def _called(model: nn.Module, run: Any, device: str) -> Any:
    """The result, the written tensor, whether the list has the caller's own tensor, and the keys of the dict."""
    x, state = (torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(device) for _ in range(2))
    seen, notes = [state], {"state": state}
    result = run(x, state, seen, notes)
    return [result, state, len(seen) == 2 and seen[1] is x, list(notes)]


@check
def writes_to_arguments() -> Any:
    """Not compiled, in a compiled model, and in a compiled function: differences, and what Python sees."""
    model, eager, found = kp_dynamo.shard(Notes(), DATA, "data"), Notes(), []
    expected = _called(eager, eager, "cpu")
    as_one_graph = torch.compile(
        lambda *args: model(*args, None), backend="kp_tpu", options={"precision": "float32"}, fullgraph=True
    )
    for run in (model, compiled(model), as_one_graph):
        result = _called(model, run, "xla")
        found.append([(a.cpu() - b).abs().max().item() for a, b in zip(result[:2], expected[:2], strict=True)])
        found[-1] += result[2:]
    return found


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 2.0


class OfObjects(nn.Module):
    def forward(self, batch: Any) -> torch.Tensor:
        return batch.x * batch.scale if isinstance(batch, Batch) else batch["x"] * 2


def _whole_batch() -> torch.Tensor:
    return torch.arange(32.0).reshape(8, 4).to("xla")


OBJECTS: tuple[Callable[[torch.Tensor], Any], ...] = (Batch, lambda x: BatchEncoding({"x": x}))


@check
def batches_in_objects() -> Any:
    """How the tensor of an object lies after the call, and the result of a compiled function."""
    model, found = kp_dynamo.shard(OfObjects(), DATA, "data"), []
    for make in OBJECTS:
        x = _whole_batch()
        model(make(x))
        found.append([spec(x), spec(compiled(lambda batch: model(batch))(make(_whole_batch())))])
    return found


@check
def an_object_in_a_batch() -> Any:
    return kp_dynamo.shard_batch({"y": torch.ones(8), "a": Batch(torch.ones(8, 4))}, DATA)


class OfNames(nn.Module):
    def forward(self, cache_position: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids + cache_position


@check
def a_batch_by_its_name() -> Any:
    """transformers' `generate` passes the positions first."""
    model, positions, ids = kp_dynamo.shard(OfNames(), DATA, "data"), torch.arange(4).to("xla"), _whole_batch()
    model(cache_position=positions, input_ids=ids)
    return [spec(positions), spec(ids)]


@slow_check
def generation() -> Any:
    """The tokens of a divided Llama: whether they are those of one device, by its own `generate` and compiled."""
    model = MODELS["llama"].make().eval()
    model.config.use_cache = model.generation_config.use_cache = True
    prompts = torch.randint(3, 128, (8, 6), generator=torch.Generator().manual_seed(1))
    expected = model.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=0)
    kp_dynamo.shard(model, DATA, "fsdp")
    run = kp_dynamo.compile_for_generation(model, max_length=16, options={"precision": "float32"})
    results = [
        run.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=0),
        model.generate(prompts.to("xla"), max_new_tokens=6, do_sample=False, pad_token_id=0).cpu(),
    ]
    return [torch.equal(result, expected) for result in results]
