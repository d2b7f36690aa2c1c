"""Flash attention kernels of a divided model. XLA:CPU has none: operators in their place compute the same."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import kp_dynamo
from kp_dynamo.lowering import flash_calls, program
from kp_dynamo.ops.flash_kernels import FlashKernel
from tests.sharding.registry import compiled, slow_check

LENGTH = 128
SHARDINGS = {
    "data": ({"data": 8}, "data", 8),
    "fsdp": ({"data": 8}, "fsdp", 8),
    "both": ({"data": 4, "model": 2}, "fsdp+tensor", 8),
    "heads": ({"data": 2, "model": 4}, "tensor", 8),
    "heads_first": ({"model": 4, "data": 2}, "tensor", 4),
    "uneven": ({"data": 8}, "data", 3),  # 12 heads in the batch do not divide
}
"""A name -> the mesh, the sharding and the rows of a batch."""


def call_kernel(kernel: FlashKernel, operands: Any, shapes: Any, dtypes: Any) -> list[torch.Tensor]:
    """What JAX's kernels compute."""
    CALLED.append((kernel.part, kernel.num_heads, [list(x.shape[:2]) for x in operands]))
    q, k, v, *rest = (x.squeeze(0).float() for x in operands)
    scores = q @ k.mT * kernel.scoring.scale
    if kernel.scoring.is_causal:
        after = torch.ones(kernel.num_queries, kernel.num_keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(after, -torch.inf)
    if kernel.part in ("forward", "train"):
        largest = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - largest)
        sums = weights.sum(-1, keepdim=True)
        found = [weights @ v / sums, *(x.expand(-1, -1, 128) for x in (sums, largest))][: len(shapes)]
    else:
        sums, largest, grad, delta = rest
        weights = torch.exp(scores - largest[..., :1]) / sums[..., :1]
        d_scores = weights * (grad @ v.mT - delta[..., :1]) * kernel.scoring.scale
        found = [d_scores.mT @ q, weights.mT @ grad] if kernel.part == "keys" else [d_scores @ k]
    assert [[1, *x.shape] for x in found] == [list(shape) for shape in shapes]
    return [x.unsqueeze(0).to(dtype).contiguous() for x, dtype in zip(found, dtypes, strict=True)]


CALLED: list[Any] = []


def model() -> nn.Module:
    """Two heads share keys and values."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=LENGTH, use_cache=False))


def trained(module: nn.Module, run: Any, ids: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    loss = run(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), [p.grad.cpu() for p in module.parameters()]


def with_kernels(how: str) -> dict[str, Any]:
    mesh, sharding, rows = SHARDINGS[how]
    ids = torch.randint(256, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    eager, divided = model(), model()
    loss, gradients = trained(eager, eager, ids)
    kp_dynamo.shard(divided, mesh, sharding)
    run = compiled(divided, extra_passes=[kp_dynamo.FlashAttention()])
    CALLED.clear()
    waits: list[bool] = []

    def barriers(barrier: Any, *, waits: bool = True, seen: list[bool] = waits) -> Any:
        seen.append(waits)
        return original(barrier, waits=waits)

    original = program.barriers
    with (
        mock.patch.object(flash_calls, "call_kernel", call_kernel),
        mock.patch.object(program, "has_kernels", return_value=True),
        mock.patch.object(program, "barriers", barriers),
    ):
        found, own = trained(divided, run, kp_dynamo.shard_batch(ids, mesh))
    pairs = zip(own, gradients, strict=True)
    return {
        "loss": abs(found - loss) / loss,
        "gradients": max((a - b).norm().item() / max(b.norm().item(), 1e-3) for a, b in pairs),
        "called": CALLED.copy(),
        "waits": waits,
    }


@slow_check
def kernels_of_a_divided_model() -> dict[str, Any]:
    return {how: with_kernels(how) for how in SHARDINGS}
