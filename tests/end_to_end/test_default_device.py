"""`torch.set_default_device` is for the user's tensors, and not for those that a compiled call makes for itself."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from kp_dynamo import mark_sequence
from tests.spine import compiled

STEPS = {
    "dropout": (lambda x: F.dropout(x, 0.5), {}),
    "shared results": (lambda x: (x * 2).chunk(2), {}),
    "overlapping results": (lambda x: ((x * 2).expand(2, 3, 4), (x * 2).unfold(1, 2, 1)), {}),
    "padded": (lambda x: x.softmax(0).cumsum(0) * x.shape[0], {"buckets": [8]}),
}


@pytest.mark.quick("xla-dropout", "meta-shared results", "meta-padded")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("device", ["meta", "xla"])
def test_results_and_gradients_are_those_without_it(name, device):
    step, options = STEPS[name]
    found = []
    for context in (contextlib.nullcontext(), torch.device(device)):
        x = torch.linspace(-1, 1, 12, device="cpu").reshape(3, 4).requires_grad_()
        with context:
            torch.manual_seed(0)
            run = compiled(step, **options)
            for _ in range(2):
                results = run(mark_sequence(x, 0) if options else x)
                results = results if isinstance(results, tuple) else (results,)
                sum(r.square().sum() for r in results).backward()
        found.append([*(r.detach() for r in results), x.grad])
    for mine, wanted in zip(*found, strict=True):
        assert torch.equal(mine, wanted)
