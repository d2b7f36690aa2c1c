"""Padding keeps the gradients that a function asks for itself, whatever its caller's grad mode is."""

from __future__ import annotations

import pytest
import torch

from tests.spine import compiled

WEIGHT = torch.arange(16.0).reshape(4, 4) / 16


def tracked(x, w):
    with torch.enable_grad():
        return x @ w, x.sin()


def tracked_between(x, w):
    y = x * 2
    with torch.enable_grad():
        z = x @ w
    return y, z, z * y


@pytest.mark.quick("cpu-tracked_between-True", "xla-tracked-True", "xla-tracked_between-False")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("fn", [tracked, tracked_between])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_gradients_that_the_function_enables_under_no_grad(fn, needs_grad, device):
    run = compiled(fn, buckets="pow2", dynamic=True)
    for length in (3, 5, 6):
        found = []
        for call, place in ((fn, "cpu"), (run, device)):
            x = torch.linspace(-1, 1, 4 * length).reshape(length, 4).to(place).requires_grad_(needs_grad)
            w = WEIGHT.clone().to(place).requires_grad_()
            with torch.no_grad():
                results = call(x, w)
            sum(r.square().sum() for r in results if r.requires_grad).backward()
            found.append([*results, *(r.requires_grad for r in results), w.grad, x.grad])
        for mine, expected in zip(found[1], found[0], strict=True):
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(mine.detach().cpu(), expected.detach())
            else:
                assert mine == expected
