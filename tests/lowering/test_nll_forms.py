"""The gradient of the negative log likelihood is 0 where a target is ignored, whatever the gradient of the loss."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.spine import DEVICES, assert_same, compiled, on

TARGETS = {
    "rows": (torch.tensor([1, -100, 3, -100]), (4, 5)),
    "images": (torch.tensor([[[1, -100], [0, 2]], [[-100, -100], [-100, -100]]]), (2, 5, 2, 2)),
    "one": (torch.tensor(-100), (5,)),
    "all ignored": (torch.full((3,), -100), (3, 5)),
}


@pytest.mark.quick(
    "False-none-rows-xla", "False-mean-all ignored-cpu", "False-none-one-cpu", "True-mean-images-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_ignored_targets(weighted, reduction, name, device):
    target, shape = TARGETS[name]
    logits = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
    weight = torch.linspace(0.5, 2, 5) if weighted else None

    def of(logits, target, weight):
        return F.cross_entropy(logits, target, weight, reduction=reduction)

    for value in (1.0, math.nan, math.inf) if reduction == "none" else (1.0,):
        given = torch.where(target == -100, value, 1.0) if reduction == "none" else torch.tensor(value)
        found = []
        for run, place in ((of, "cpu"), (compiled(of), device)):
            x, t, w, g = on(place, (logits.clone().requires_grad_(), target, weight, given))
            run(x, t, w).backward(g)
            found.append(x.grad.cpu())
        assert not found[0].isnan().any()
        assert_same(found[1], found[0])


def test_a_mean_of_each_sequence_of_which_one_has_no_target():
    target = torch.tensor([[1, 2, -100], [-100, -100, -100]])

    def loss(w, x):
        each = F.cross_entropy((x @ w).flatten(0, 1), target.flatten().to(x.device), reduction="none").view(2, 3)
        count = (target != -100).sum(1).to(x.device)
        return torch.where(count > 0, each.sum(1) / count, 0.0).sum()

    w, x = torch.ones(8, 5, requires_grad=True), torch.linspace(-1, 1, 48).reshape(2, 3, 8)
    compiled(loss)(w, x).backward()
    mine, w.grad = w.grad, None
    loss(w, x).backward()
    assert_same(mine, w.grad)
