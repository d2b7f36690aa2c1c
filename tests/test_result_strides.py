"""Results on the CPU lie in memory as eager's do, whatever the passes did on the way to them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.spine import assert_same, compiled


def heads(x, w):
    return F.linear(x, w).view(2, 128, 4, 4).transpose(1, 2)


def image(x, w):
    return F.linear(x, w).view(2, 16, 8, 16).permute(0, 3, 1, 2)


KERNEL = torch.ones(6, 16, 3, 3)
CASES = {
    "heads": heads,
    "a sum of heads": lambda x, w: heads(x, w) + 1,
    "sort": lambda x, w: heads(x, w).sort(stable=True),
    "argsort": lambda x, w: heads(x, w).argsort(stable=True),
    "frexp": lambda x, w: torch.frexp(heads(x, w)),
    "group_norm": lambda x, w: F.group_norm(image(x, w), 4),
    "max_pool2d": lambda x, w: F.max_pool2d(image(x, w), 2, return_indices=True),
    "conv2d": lambda x, w: F.conv2d(image(x, w), KERNEL),
    "conv2d and relu": lambda x, w: F.conv2d(image(x, w), KERNEL).relu(),
    "attention": lambda x, w: F.scaled_dot_product_attention(heads(x, w), heads(x, w), heads(x, w)),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(image(x, w), KERNEL.transpose(0, 1)),
}


@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", CASES)
def test_strides_are_those_of_eager(case, trains):
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(size, generator=generator) / 4 for size in ((2, 128, 16), (16, 16))]
    args = [t.requires_grad_(trains) for t in args]
    assert_same(compiled(CASES[case])(*args), CASES[case](*args))
