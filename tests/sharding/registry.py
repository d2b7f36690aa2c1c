"""The checks of `worker.py`, and what many of them use."""

from __future__ import annotations

from typing import Any

import torch
import torch_xla
from torch import nn

from kp_dynamo.compat import xla
from tests.worker_checks import Checks

CHECKS = Checks()
check, slow_check = CHECKS.check, CHECKS.slow_check
DATA, BOTH = {"data": 8}, {"data": 4, "model": 2}


def spec(tensor: torch.Tensor) -> str:
    return xla.xlac()._get_xla_sharding_spec(tensor)


def placed_as(tensor: torch.Tensor) -> str:
    """The sharding of a tensor, also of one that is still to be computed."""
    torch_xla.sync()
    return spec(tensor) or "{replicated}"


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(128, 128), nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128))


def tokens(seed: int = 1, rows: int = 8) -> torch.Tensor:
    return torch.randint(0, 128, (rows, 16), generator=torch.Generator().manual_seed(seed))


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="kp_tpu", options={"precision": "float32", **options})


class Wrapped(nn.Module):
    """Unlike those of torch's own Sequential, the hooks of a user's class run before Dynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
