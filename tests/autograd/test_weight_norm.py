"""`weight_norm`, the hook and the parametrization: on the device, with eager's gradients."""

import pytest
import torch
from torch import nn

from tests.spine import DEVICES, check_gradients_like_eager, compiled

HOOK = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
KINDS = {"hook": nn.utils.weight_norm, "parametrization": nn.utils.parametrizations.weight_norm}
MODELS = {
    "linear": (lambda: nn.Linear(4, 5), {}, (3, 4)),
    "last dimension": (lambda: nn.Linear(4, 5), {"dim": 1}, (3, 4)),
    "whole": (lambda: nn.Linear(4, 5), {"dim": None}, (3, 4)),
    "convolution": (lambda: nn.Conv1d(4, 5, 3), {}, (2, 4, 9)),
    "transposed": (lambda: nn.ConvTranspose1d(4, 5, 3), {"dim": 1}, (2, 4, 9)),
}


@pytest.mark.quick("hook-last dimension", "hook-convolution", "parametrization-whole", "parametrization-transposed")
@HOOK
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_training_steps(kind, model):
    make, how, shape = MODELS[model]

    def fresh():
        torch.manual_seed(0)
        return KINDS[kind](make(), **how)

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for device in DEVICES:
        mine, eager = fresh().to(device), fresh()
        run = compiled(mine, strict=True)
        for _ in range(2):
            for module, y in ((mine, run(x.to(device))), (eager, eager(x))):
                y.square().sum().backward()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 0.01 * parameter.grad
                        parameter.grad = None
        for a, b in zip(mine.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients(dtype):
    v, g = torch.randn(3, 4, dtype=dtype, requires_grad=True), torch.randn(3, 1, dtype=dtype, requires_grad=True)
    check_gradients_like_eager(lambda v, g: torch._weight_norm(v, g, 0).sin(), v, g, strict=True)
    check_gradients_like_eager(lambda v, g: torch._weight_norm(v, g.mT[:, :1].expand(1, 4) * 1, 1), v, g, strict=True)
