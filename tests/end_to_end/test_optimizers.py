"""Optimizers: a compiled step, and a plain step between compiled forwards and backwards."""

import copy

import pytest
import torch
from torch import nn

from tests.spine import DEVICES, compiled


def two_models(device):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return copy.deepcopy(eager).to(device), eager


def train(model, optimizer, step, num_steps=10):
    """Losses of `num_steps` steps on the same data, drawn from a fixed seed."""
    device = next(model.parameters()).device
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(num_steps):
        x = torch.randn(5, 3, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def check_equal_training(device, make_optimizer, eager_optimizer, compile_step):
    mine, eager = two_models(device)
    optimizer, reference = make_optimizer(mine.parameters()), eager_optimizer(eager.parameters())
    # Ten steps amplify a rounding of 1e-7 a hundredfold at most here: gradients of a loss that falls.
    mine_run = compiled(mine) if not compile_step else mine
    step = compiled(optimizer.step) if compile_step else optimizer.step
    losses = train(mine_run, optimizer, step)
    torch.testing.assert_close(losses, train(eager, reference, reference.step), rtol=1e-4, atol=1e-6)
    for p, q in zip(mine.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adamw(**options):
    return lambda parameters: torch.optim.AdamW(parameters, 0.05, **options)


COMPILED_STEPS = [
    ("cpu", "sgd", sgd, sgd),
    ("cpu", "adamw foreach", adamw(foreach=True), adamw()),
    ("cpu", "adamw fused", adamw(fused=True), adamw()),
    ("xla", "sgd", sgd, sgd),
    ("xla", "adamw capturable", adamw(capturable=True, foreach=True), adamw()),
]


@pytest.mark.parametrize(
    ("device", "make_optimizer", "eager_optimizer"),
    [(device, make, eager) for device, _, make, eager in COMPILED_STEPS],
    ids=[f"{device} {name}" for device, name, _, _ in COMPILED_STEPS],
)
def test_a_compiled_step_does_what_an_eager_one_does(device, make_optimizer, eager_optimizer):
    check_equal_training(device, make_optimizer, eager_optimizer, compile_step=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw()], ids=["sgd", "adamw"])
def test_ten_steps_of_training_equal_eager(device, make_optimizer):
    check_equal_training(device, make_optimizer, make_optimizer, compile_step=False)


def test_a_fused_step_between_compiled_forwards_is_seen():
    check_equal_training("cpu", adamw(fused=True), adamw(), compile_step=False)


@pytest.mark.parametrize("device", DEVICES)
def test_a_learning_rate_that_changes_is_followed(device):
    mine, eager = two_models(device)
    optimizer, reference = sgd(mine.parameters()), sgd(eager.parameters())
    step = compiled(optimizer.step)
    for number in range(4):
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.1 / (number + 1)
        train(mine, optimizer, step, num_steps=1)
        train(eager, reference, reference.step, num_steps=1)
    for p, q in zip(mine.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compile_step", [False, True], ids=["plain step", "compiled step"])
def test_a_lazy_copy_of_the_model_outlives_the_steps_after_it(compile_step):
    mine, _ = two_models("xla")
    run, optimizer = compiled(mine), sgd(mine.parameters())
    step = compiled(optimizer.step) if compile_step else optimizer.step
    train(run, optimizer, step, num_steps=1)
    weights = [p.detach().cpu() for p in mine.parameters()]
    kept = copy.deepcopy(mine)
    train(run, optimizer, step, num_steps=2)
    for p, before in zip(kept.parameters(), weights, strict=True):
        assert torch.equal(p.detach().cpu(), before)
