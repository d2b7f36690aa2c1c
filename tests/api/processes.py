"""One of two processes that torch.distributed joins: `python -m tests.api.processes FILE RANK`; prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from kp_dynamo import TPUConfig, TPUDistributedError, create_xla_integration

ROWS = 8


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 2)).eval()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 2, generator=generator)) for _ in range(5)]


def refused(call: Any) -> str:
    try:
        call()
    except TPUDistributedError as error:
        return str(error)
    return "nothing was refused"


def trained(distributed: Any, rank: int) -> list[list[float]]:
    torch.manual_seed(rank)  # the models differ until they are wrapped
    wrapped = distributed.wrap_model(model())
    run = torch.compile(wrapped, backend="kp_tpu", options={"precision": "float32"})
    sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for x, y in batches():
        mine = distributed.shard_batch([t.chunk(2)[rank] for t in (x, y)])
        sgd.zero_grad()
        nn.functional.mse_loss(run(mine[0]), mine[1]).backward()
        for parameter in wrapped.parameters():
            parameter.grad = distributed.all_reduce(parameter.grad, op="mean")
        sgd.step()
        distributed.barrier()
    return [parameter.detach().cpu().flatten().tolist() for parameter in wrapped.parameters()]


def main(file: str, rank: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    manager, distributed, _ = create_xla_integration(TPUConfig())
    x = torch.tensor([1.0, 2.0], device="xla") + rank
    answers = {
        "world": [manager.world_size, manager.rank, distributed.is_distributed],
        **{op: distributed.all_reduce(x, op).tolist() for op in ("sum", "mean", "min", "max", "product")},
        "gathered": distributed.all_gather(x).tolist(),
        "devices": [str(distributed.all_reduce(t).device) for t in (x, x.cpu())],
        "kept": x.tolist(),
        "mean of ints": refused(lambda: distributed.all_reduce(torch.arange(2), op="mean")),
        "unlike": refused(lambda: distributed.all_gather(torch.zeros(2 + rank))),
        "complex maximum": refused(lambda: distributed.all_reduce(torch.zeros(2, dtype=torch.complex64), op="max")),
        "weights": trained(distributed, rank),
    }
    sys.stdout.write(json.dumps(answers))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
