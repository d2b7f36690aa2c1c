"""Fake tensors by `eager_rules` have the strides that eager's kernels give, for inputs in every order of memory."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from kp_dynamo.eager_rules import EagerRules

SCALAR = torch.ones(())
OF_ANY_RANK = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch_norm in evaluation": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "logsigmoid": F.logsigmoid,
    "rrelu": F.rrelu,
    "floor of a quotient": lambda x: x.div(SCALAR, rounding_mode="floor"),
    "copysign": lambda x: x.copysign(SCALAR),
    "xlogy": lambda x: torch.xlogy(x, torch.ones(x.shape[-1])),
    "select_scatter": lambda x: x.select_scatter(x[:, 0], 1, 0),
    "slice_scatter": lambda x: x.slice_scatter(x[:, :1], 1, 0, 1),
    "diagonal_scatter": lambda x: x.diagonal_scatter(x.diagonal()),
}
OF_IMAGES = {
    "avg_pool2d": lambda x: F.avg_pool2d(x, 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 1, return_indices=True),
    "reflection": lambda x: F.pad(x, (1, 1, 0, 0), mode="reflect"),
    "replication": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
}
OF_VOLUMES = {
    "avg_pool3d": lambda x: F.avg_pool3d(x, 1),
    "reflection": lambda x: F.pad(x, (1,) * 6, mode="reflect"),
    "replication": lambda x: F.pad(x, (1,) * 6, mode="replicate"),
}
CASES = [
    *((fn, shape) for fn in OF_ANY_RANK.values() for shape in ((2, 4), (2, 4, 6), (2, 4, 3, 5), (1, 4, 3, 5))),
    *((fn, shape) for fn in OF_IMAGES.values() for shape in ((2, 4, 3, 5), (1, 4, 3, 5), (2, 4, 1, 5))),
    *((fn, (2, 4, 3, 5, 2)) for fn in OF_VOLUMES.values()),
]


INDEXED = {
    "rows": lambda x, i, j: x[i],
    "columns": lambda x, i, j: x[:, i],
    "two together": lambda x, i, j: x[i, j],
    "two apart": lambda x, i, j: x[i, :, j],
    "with another of one row": lambda x, i, j: x[:, i[:1], j],
    "with another of one column": lambda x, i, j: x[i[:, :1], j],
    "by a vector": lambda x, i, j: x[:, i[0]],
}


def layouts(shape):
    """Tensors of a shape: their dimensions in every order of memory, with holes, and expanded."""
    orders = list(itertools.permutations(range(len(shape))))
    for order in orders if len(orders) < 100 else [*orders[::13], (0, 2, 3, 4, 1)]:
        back = [order.index(d) for d in range(len(shape))]
        yield torch.randn([shape[d] for d in order]).permute(back)
    yield torch.randn(*shape[:-1], shape[-1] * 2)[..., ::2]
    yield torch.randn(shape[0], shape[1] * 2, *shape[2:])[:, : shape[1]]
    yield torch.randn(1, *shape[1:]).expand(shape)


def strides(results):
    """Those that say something: where a dimension has one element, any stride is right."""
    tensors = [t for t in pytree.tree_leaves(results) if t.numel() > 1]
    return [[step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1] for t in tensors]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_fake_strides_are_those_of_eager(number):
    fn, shape = CASES[number]
    for x in layouts(shape):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, EagerRules():
            fake = fn(mode.from_tensor(x))
        assert strides(fake) == strides(fn(x)), x.stride()


@pytest.mark.parametrize("name", INDEXED)
def test_fake_strides_of_indexing_are_those_of_eager(name):
    indices = list(layouts((2, 3)))
    tensors = [*layouts((4, 4, 5)), *layouts((4, 4, 5, 2))]
    for x, i, j in itertools.islice(itertools.product(tensors, indices, indices), 0, None, 13):
        i, j = (index.long().fill_(1) if 0 not in index.stride() else index.long() * 0 for index in (i, j))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, EagerRules():
            fake = INDEXED[name](*map(mode.from_tensor, (x, i, j)))
        assert strides(fake) == strides(INDEXED[name](x, i, j)), (x.stride(), i.stride(), j.stride())
