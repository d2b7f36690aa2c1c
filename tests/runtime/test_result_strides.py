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


@pytest.mark.quick(
    "a sum of heads-training", "sort-training", "frexp-training", "max_pool2d-training", "conv2d and relu-training",
    "conv_transpose2d-training", "attention-training",
)  # fmt: skip
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", CASES)
def test_strides_are_those_of_eager(case, trains):
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(size, generator=generator) / 4 for size in ((2, 128, 16), (16, 16))]
    args = [t.requires_grad_(trains) for t in args]
    assert_same(compiled(CASES[case])(*args), CASES[case](*args))


def transposed(shape, generator):
    return torch.randn(*reversed(shape), generator=generator).permute(*reversed(range(len(shape))))


def channels_last(shape, generator):
    return torch.randn(shape[0], *shape[2:], shape[1], generator=generator).movedim(-1, 1)


def sliced(shape, generator):
    return torch.randn(*shape[:-1], shape[-1] * 2, generator=generator)[..., ::2]


# Operators of which torch's fake tensors have other strides than eager, and what takes its strides from them.
OTHER_FAKES = {
    "norms": lambda x: (
        F.batch_norm(x, None, None, training=True),
        F.batch_norm(x, None, None, training=True).relu().transpose(0, 1) + 1,
        F.batch_norm(x, None, None, training=True).mT.exp(),
        F.instance_norm(x),
    ),
    "pools": lambda x: (F.avg_pool1d(x, 2), F.max_pool1d(x, 2), F.max_pool1d(x, 2) * 2),
    "elementwise": lambda x: (F.logsigmoid(x), x.detach() // torch.ones(()), torch.copysign(x, torch.ones(())), x + 1),
    "views": lambda x: ((x * 2).mT, *(x + 1).unbind(1), *(x + 2).chunk(2, 1), x.sin().permute(2, 0, 1)),
}


@pytest.mark.quick("norms-transposed-training", "pools-transposed-training", "views-transposed-training")
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    "layout", [transposed, *(pytest.param(fn, marks=pytest.mark.slow) for fn in (channels_last, sliced))]
)
@pytest.mark.parametrize("case", OTHER_FAKES)
def test_strides_of_inputs_that_are_not_contiguous(case, layout, trains):
    """At two lengths: the second call makes the sizes symbolic."""
    generator, fn = torch.Generator().manual_seed(0), OTHER_FAKES[case]
    run = compiled(fn)
    for length in (3, 5):
        x = layout((length, 4, 6), generator).requires_grad_(trains)
        assert_same(run(x), fn(x))


def test_strides_of_windows_that_overlap():
    """A pool of what looks like channels last to a fake tensor, and not to eager."""
    assert_same(compiled(windows)(torch.ones(2, 6)), windows(torch.ones(2, 6)))


def windows(x):
    return F.avg_pool1d(x.unfold(1, 2, 1).transpose(1, 2), 2)


@pytest.mark.quick("kernel0", "kernel2")
@pytest.mark.parametrize("kernel", [(1, 3), (7, 1), (7, 4), 1])
def test_strides_of_patches_that_touch(kernel):
    """Fake tensors have those of a view."""
    x = torch.ones(1, 1, 7, 4)
    fns = (lambda x: F.unfold(x, kernel, stride=kernel), lambda x: F.unfold(x[0], kernel, stride=kernel) * 2)
    for fn in fns:
        assert_same(compiled(fn)(x), fn(x))


FREE_STRIDES = {
    "a row": (lambda x: x + 1, torch.arange(5.0).reshape(5, 1).mT),
    "a permuted tensor": (lambda x: (x + 1) * 2, torch.arange(12.0).reshape(3, 1, 4).permute(0, 2, 1)),
    "an empty view": (lambda x: (x + 1).mT, torch.ones(2, 0, 3)),
    "inverses of nothing": (torch.linalg.inv, torch.ones(0, 2, 2)),
}


@pytest.mark.quick(
    "a row-inference-None", "a row-training-pow2", "a permuted tensor-training-None",
    "a permuted tensor-inference-pow2", "an empty view-training-pow2", "inverses of nothing-inference-None",
)  # fmt: skip
@pytest.mark.parametrize("buckets", [None, "pow2"])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", FREE_STRIDES)
def test_strides_of_dimensions_with_one_element_or_none(name, trains, buckets):
    fn, x = FREE_STRIDES[name]
    how = {} if buckets is None else {"buckets": buckets}
    found, expected = (run(x.detach().requires_grad_(trains)) for run in (compiled(fn, **how), fn))
    assert found.stride() == expected.stride()
    assert_same(found, expected)
