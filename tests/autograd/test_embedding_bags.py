"""`embedding_bag` stays in the program, with eager's values and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch_xla.debug import metrics

from kp_dynamo import mark_sequence
from tests.spine import assert_same, check_gradients_like_eager, check_like_eager, compiled

TABLE = torch.arange(60.0).reshape(12, 5).cos()
INDICES = torch.tensor([3, 1, 3, 11, 0, 7, 7, 2, 9])
OFFSETS = torch.tensor([0, 0, 3, 4, 4, 8])
WEIGHTS = torch.linspace(-1, 2, 9)
MODES = ("sum", "mean", "max")
BAGS = {
    "offsets": lambda t, i, o, mode: F.embedding_bag(i, t, o, mode=mode),
    "rows of bags": lambda t, i, o, mode: F.embedding_bag(i.view(3, 3), t, mode=mode),
    "padding": lambda t, i, o, mode: F.embedding_bag(i, t, o, mode=mode, padding_idx=7),
    "last offset": lambda t, i, o, mode: F.embedding_bag(
        i, t, torch.cat((o, o.new_tensor([9]))), mode=mode, include_last_offset=True
    ),
    "int32": lambda t, i, o, mode: F.embedding_bag(i.int(), t, o.int(), mode=mode),
}


@pytest.mark.quick("offsets", "padding-mean", "rows of bags-max", "last offset-sum", "int32-sum")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BAGS)
def test_values_and_gradients_are_eagers(name, mode):
    def bags(t, i, o):
        return BAGS[name](t.sin(), i, o, mode)

    check_like_eager(bags, TABLE, INDICES, OFFSETS, strict=True)
    check_gradients_like_eager(bags, TABLE.clone().requires_grad_(), INDICES, OFFSETS, strict=True)


@pytest.mark.parametrize("padding", [None, 7])
def test_weights_and_their_gradients(padding):
    def bags(t, i, o, w):
        return F.embedding_bag(i, t, o, mode="sum", per_sample_weights=w, padding_idx=padding)

    tensors = TABLE.clone().requires_grad_(), INDICES, OFFSETS, WEIGHTS.clone().requires_grad_()
    check_gradients_like_eager(bags, *tensors, strict=True)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_scaled_by_frequency(mode):
    """Eager of torch 2.9 divides by the counts of other indices on the CPU."""
    plain, scaled = TABLE.clone().requires_grad_(), TABLE.clone().requires_grad_()
    F.embedding_bag(INDICES, plain, OFFSETS, mode=mode).cos().sum().backward()
    run = compiled(lambda t, i, o: F.embedding_bag(i, t, o, mode=mode, scale_grad_by_freq=True).cos(), strict=True)
    run(scaled, INDICES, OFFSETS).sum().backward()
    assert_same(scaled.grad, plain.grad / INDICES.bincount(minlength=12).clamp(min=1)[:, None])


@pytest.mark.parametrize("mode", MODES)
def test_no_index_and_no_bag(mode):
    check_like_eager(lambda t, i, o: F.embedding_bag(i[:0], t, o * 0, mode=mode), TABLE, INDICES, OFFSETS, strict=True)
    check_like_eager(
        lambda t, i, o: F.embedding_bag(i[:0].view(0, 3), t, mode=mode), TABLE, INDICES, OFFSETS, strict=True
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_torch_embedding_bag_returns_beside_them(dtype, mode):
    number = MODES.index(mode)
    check_like_eager(
        lambda t, i, o: torch.embedding_bag(t, i, o, False, number), TABLE.to(dtype), INDICES, OFFSETS, strict=True
    )


def test_a_maximum_of_nan_and_of_equals():
    table = TABLE.clone()
    table[3], table[11], table[2, 0], table[9] = math.nan, math.inf, -math.inf, table[2]
    indices, offsets = torch.tensor([3, 1, 1, 3, 2, 9, 9, 2, 3, 11]), torch.tensor([0, 2, 4, 6, 8])
    check_like_eager(lambda t, i, o: torch.embedding_bag(t, i, o, False, 2), table, indices, offsets, strict=True)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_summed_in_float32(mode):
    def bags(t, i):
        return F.embedding_bag(i.view(2, -1), t, mode=mode)

    table, indices = TABLE[:3].bfloat16(), torch.arange(3000) % 3
    assert_same(compiled(bags, strict=True)(table, indices), bags(table.double(), indices).bfloat16())


@pytest.mark.parametrize("kind", [torch.triu_indices, torch.tril_indices])
def test_indices_of_triangles(kind):
    """The pairs of features of a recommender."""
    metrics.clear_all()
    check_like_eager(lambda x: x[kind(5, 5, 1, device=x.device).unbind()].sin(), torch.randn(5, 5), strict=True)
    assert metrics.executed_fallback_ops() == []


@pytest.mark.quick("mean")
@pytest.mark.parametrize("mode", MODES)
def test_lengths_that_vary(mode):
    def bags(i, t):
        return F.embedding_bag(i, t, mode=mode)

    for how in ({"dynamic": True}, {"buckets": [4, 8]}):
        run = compiled(bags, strict=True, **how)
        for length in (3, 5, 6, 1):
            indices = mark_sequence(torch.arange(2 * length).reshape(2, length) % 12, 1)
            mine, eager = TABLE.clone().requires_grad_(), TABLE.clone().requires_grad_()
            results = [fn(indices, table).sin() for fn, table in ((run, mine), (bags, eager))]
            for result in results:
                result.sum().backward()
            assert_same((results[0], mine.grad), (results[1], eager.grad))
