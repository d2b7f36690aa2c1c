"""Which arguments the call of a divided model divides, and what the model writes to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import kp_dynamo
from tests.sharding.registry import DATA, check, compiled


class Notes(nn.Module):
    """Writes to a tensor, a list and a dict of its caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, state: torch.Tensor, seen: list[Any], notes: dict[str, Any]) -> torch.Tensor:
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
    for run in (model, compiled(model), compiled(lambda *args: model(*args))):
        result = _called(model, run, "xla")
        found.append([(a.cpu() - b).abs().max().item() for a, b in zip(result[:2], expected[:2], strict=True)])
        found[-1] += result[2:]
    return found
