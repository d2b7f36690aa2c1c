"""CheckIndices: indices out of range raise IndexError with the place, valid ones change nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kp_dynamo.passes.check_indices import CheckIndices
from tests.graphs import applied, trace_inference
from tests.spine import DEVICES, assert_same, check_gradients_like_eager, compiled, on

X = torch.arange(12.0).view(3, 4)
# Each takes values [3, 4] and indices, of which the second list has one out of range.
CASES = {
    "embedding": (lambda x, i: F.embedding(i, x), [0, 2], [0, 3]),
    "negative": (lambda x, i: F.embedding(i, x), [0, 2], [0, -1]),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x), [0, 2], [7, 0]),
    "gather": (lambda x, i: x.gather(1, i[:, None]), [0, 3, 1], [0, 4, 1]),
    "scatter": (lambda x, i: x.scatter(1, i[:, None], 9.0), [0, 3, 1], [0, 1, -1]),
    "scatter_add": (lambda x, i: x.scatter_add(1, i[:, None], x), [0, 3, 1], [0, 1, 4]),
    "index_select": (lambda x, i: x.index_select(0, i), [2, 0], [3, 0]),
    "index_add": (lambda x, i: x.index_add(1, i, x[:, :2]), [3, 0], [4, 0]),
    "index_fill": (lambda x, i: x.index_fill(1, i, 0.5), [-4, 0], [-5, 0]),
    "indexing": (lambda x, i: x[i], [2, -3], [2, -4]),
    "two lists": (lambda x, i: x[i, i + 1], [2, -1], [2, 3]),
    "a slice first": (lambda x, i: x[:, i], [3, -4], [3, 4]),
    "writing": (lambda x, i: x.index_put((i,), x[:2]), [1, 2], [1, 3]),
    "targets": (lambda x, i: F.cross_entropy(x, i), [0, -100, 3], [0, -100, 4]),
    "targets of images": (lambda x, i: F.cross_entropy(x[..., None], i[:, None]), [0, -100, 3], [0, -1, 3]),
    "a mask": (lambda x, i: torch.where(x[i >= 0] > 1, 0.0, x), [0, 0, 0], None),
}


@pytest.mark.quick("xla", "embedding-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_valid_indices_change_nothing_and_others_raise(name, device):
    fn, valid, wrong = CASES[name]
    run = compiled(fn, check_indices=True)
    given = X, torch.tensor(valid)
    assert_same(run(*on(device, given)), fn(*given))
    if wrong is not None:
        with pytest.raises(
            IndexError, match=r"(?s)at tests/passes/test_check_indices.py.*1 of .* out of range.*Allowed"
        ):
            run(*on(device, (X, torch.tensor(wrong))))
        assert_same(run(*on(device, given)), fn(*given))


def test_gradients_and_later_sizes():
    index = torch.tensor([[0], [3], [1]])
    check_gradients_like_eager(lambda x, i: x.sin().gather(1, i), X.clone().requires_grad_(), index, check_indices=True)
    run = compiled(lambda x, i: x[i], dynamic=True, check_indices=True)
    for rows in (5, 9):
        x = torch.randn(rows, 2)
        assert_same(run(x, torch.tensor([rows - 1, -rows])), x[[rows - 1, -rows]])
        with pytest.raises(IndexError, match=f"Allowed: -{rows} to {rows - 1}"):
            run(x, torch.tensor([rows, 0]))


def test_the_error_names_the_module():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Tanh())
    with pytest.raises(IndexError, match=r"in 0 \(Embedding\).*the first is 7"):
        compiled(model, check_indices=True, strict=True)(torch.tensor([1, 7]))


def test_a_graph_without_indices_is_not_changed():
    assert applied(CheckIndices(), trace_inference(lambda x: x.sin() * 2, X)).rewritten == 0


@pytest.mark.parametrize("options", [{"buckets": [8]}, {"lowering": "stock"}])
def test_options_it_cannot_be_combined_with(options):
    with pytest.raises(Exception, match="check_indices=True is invalid with"):
        compiled(lambda x: x + 1, check_indices=True, **options)(X)
