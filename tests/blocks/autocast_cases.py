"""Models under autocast, compiled whole and divided. Run with XLA_FLAGS=--xla_allow_excess_precision=false.

By default XLA keeps float32 between two operators of a program where the graph rounds to bfloat16, so that a cut
changes roundings. Without that, results of the divided graph are bit-equal to those of the whole graph.
"""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import Tensor, nn

from kp_dynamo.compat import xla
from tests.blocks import stacks
from tests.blocks.test_divided_models import divided, flat
from tests.spine import DEVICES


class Normalizing(nn.Module):
    """Autocast computes the softmax in float32 on the XLA device, and in bfloat16 on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.norm(self.down(torch.tanh(self.up(x)))), -1)


class Nested(Normalizing):
    """A region of its own in each layer, and in it one that is disabled."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            y = super().forward(x)
            with torch.autocast(device, enabled=False):
                y = y.float() @ self.up.weight
            return self.up(y)


class ByState(stacks.Stack):
    """Layers that differ only in the state of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        x = self.embed(x)
        for layer in self.layers[:3]:
            x = layer(x)
        with torch.autocast(device, torch.bfloat16):
            for layer in self.layers[3:6]:
                x = layer(x)
            with torch.autocast(device, enabled=False):
                x = x.float()
                for layer in self.layers[6:9]:
                    x = layer(x)
            for layer in self.layers[9:]:
                x = layer(x)
        return self.head(x.float())


class OfTheCpu(stacks.Stack):
    """A region of the CPU, which has no effect on XLA tensors."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class _Float32Head(nn.Linear):
    """The head of a model whose layers return bfloat16. It is outside of autocast, where eager wants one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def _stack(layer: type[nn.Module], kind: type[stacks.Stack] = stacks.Stack) -> nn.Module:
    model = kind(4, layer)
    if layer is Nested:
        model.head = _Float32Head(stacks.WIDTH, 2)
    return model


# name -> (model, whether autocast is around the call, runs of each piece)
CASES = {
    "around": (lambda: _stack(stacks.Layer), True, [1, 4, 1]),
    "softmax": (lambda: _stack(Normalizing), True, [1, 4, 1]),
    "inside": (lambda: stacks.Autocast(4, Normalizing), False, [1, 4, 1]),
    "nested": (lambda: _stack(Nested), False, [1, 3, 1]),
    "nested and around": (lambda: _stack(Nested), True, [1, 4, 1]),
    "by state": (lambda: ByState(12, Normalizing), False, [1, 3, 1, 2, 1, 3, 1, 2, 1]),
    "of the cpu": (lambda: OfTheCpu(4, Normalizing), False, [1, 4, 1]),
    "of the cpu and around": (lambda: OfTheCpu(4, Normalizing), True, [1, 4, 1]),
    "shared": (stacks.Shared, True, [1, 4, 1]),
    "frozen": (lambda: stacks.Frozen(6, Normalizing), True, None),
    "checkpoint": (lambda: _stack(Nested, stacks.Checkpointed), False, [1, 3, 1]),
    "checkpoint and around": (lambda: stacks.Checkpointed(4, Normalizing), True, None),
}
# On XLA, where each layer returns float32, and the first one gets bfloat16.
ON_XLA = {
    "softmax": [1, 3, 1],
    "inside": [1, 3, 1],
    "by state": [1, 3, 3, 1, 3, 3, 1],
    "of the cpu and around": [1, 3, 1],
}


def _step(model: nn.Module, device: str, is_around: bool, blocks: str) -> tuple[Tensor, Tensor, list[list[int]]]:
    """The result without gradients, the gradients of the parameters, and the runs of the pieces of each graph."""
    mine, events = divided(copy.deepcopy(model).to(device), blocks=blocks)
    x = torch.linspace(-1, 1, 30).view(2, 5, 3).to(device)

    def around() -> contextlib.AbstractContextManager[None]:
        return torch.autocast(device, torch.bfloat16) if is_around else contextlib.nullcontext()

    with torch.no_grad(), around():
        result = mine(x)
    with around():
        trained = mine(x)
    trained.float().square().sum().backward()
    assert torch.equal(trained.detach().cpu(), result.cpu())
    gradients = flat([p.grad for p in mine.parameters()])
    return result.cpu(), gradients, [[piece.runs for piece in event.pieces] for event in events]


def main(*names: str, devices: tuple[str, ...] = DEVICES) -> None:
    """Compare both ways for each case and device."""
    torch.ones(1, device=xla.device())
    for name in names:
        make, is_around, on_cpu = CASES[name]
        torch.manual_seed(0)
        model = make()
        for device in devices:
            torch._dynamo.reset()
            expected = ON_XLA.get(name, on_cpu) if device == "xla" else on_cpu
            whole, cut = (_step(model, device, is_around, blocks) for blocks in ("off", "on"))
            assert cut[0].dtype is whole[0].dtype, (name, device)
            assert torch.equal(cut[0], whole[0]), (name, device)
            assert float((cut[1] - whole[1]).norm()) <= 1e-6 * float(whole[1].norm()), (name, device)
            assert all(max(runs) > 1 if expected is None else runs == expected for runs in cut[2]), (name, cut[2])
