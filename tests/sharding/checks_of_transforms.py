"""Transforms of torch.func and forward-mode AD of a divided model, compiled and not, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import kp_dynamo
from tests.sharding.registry import DATA, check

X, V = (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 1024), nn.Tanh(), nn.Linear(1024, 4))


def forward_mode(net: nn.Module, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, v))).tangent


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "jvp": lambda net, x, v: torch.func.jvp(net, (x,), (v,))[1],
    "forward mode": forward_mode,
    "gradient of the input": lambda net, x, _: torch.func.grad(lambda a: net(a).sum())(x),
    "jacobian of the input": lambda net, x, _: torch.func.jacrev(lambda a: net(a).sum(0))(x),
    "jacobian of each row": lambda net, x, _: torch.func.vmap(torch.func.jacfwd(net))(x),
    "each row": lambda net, x, _: torch.func.vmap(net)(x),
}


@check
def transforms() -> Any:
    """The largest difference by transform: compiled, then not compiled."""
    found, net, eager = {}, kp_dynamo.shard(model(), DATA, "fsdp"), model()
    x, v = kp_dynamo.shard_batch(X, DATA), kp_dynamo.shard_batch(V, DATA)
    for name, transform in TRANSFORMS.items():
        expected = transform(eager, X, V).detach()
        run = torch.compile(transform, backend="kp_tpu", options={"precision": "float32"})
        found[name] = [(f(net, x, v).detach().cpu() - expected).abs().max().item() for f in (run, transform)]
    return found
