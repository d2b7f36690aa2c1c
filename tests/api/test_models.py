"""Sample inputs: the copies that a model is called with."""

import torch
from torch import nn

from kp_dynamo import mark_sequence
from kp_dynamo.api.models import SampleInputs

MODEL = nn.Linear(2, 2)


def copied(*args):
    return SampleInputs(args).on_device_of(MODEL).args


def test_a_copy_may_be_written_to():
    x = torch.ones(3)
    copied(x)[0].mul_(2)
    assert x.tolist() == [1, 1, 1]


def test_copies_are_one_tensor_or_share_memory_where_their_originals_do():
    x = torch.ones(2, 3)
    first, second, row = copied(x, x, x[0])
    assert first is second
    row.zero_()
    assert first.tolist() == [[0, 0, 0], [1, 1, 1]]


def test_a_copy_compiles_like_its_original():
    with torch.inference_mode():
        inferred = torch.ones(3)
    given = (
        torch.ones(4, 3).t(),
        torch.ones(1).expand(3),
        mark_sequence(torch.ones(3, requires_grad=True), 0),
        inferred,
    )
    for mine, original in zip(copied(*given), given, strict=True):
        assert mine.stride() == original.stride()
        assert mine.is_inference() == original.is_inference()
        assert mine.requires_grad == original.requires_grad
        assert vars(mine) == vars(original)


def test_a_copy_of_a_result_is_a_result_but_no_part_of_its_graph():
    x = torch.ones(3, requires_grad=True)
    result = x * 1
    with torch.no_grad():
        (mine,) = copied(result)
    mine.mul_(2).sum().backward()
    assert x.grad is None
