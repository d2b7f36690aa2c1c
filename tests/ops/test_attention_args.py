from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from kp_dynamo.ops.attention_args import AttentionArgs
from kp_dynamo.ops.attention_scoring import Scoring

kp = torch.ops.kp
OPERATORS = (kp.attention.default, kp.attention_train.default, kp.attention_backward.default)


@pytest.mark.parametrize("target", OPERATORS, ids=str)
def test_arguments_by_name_and_back_in_order(target):
    """The names are those of the schema, which no other place decodes by position."""
    names = [argument.name for argument in target._schema.arguments]
    args = AttentionArgs.of(SimpleNamespace(target=target, args=tuple(names)))
    assert args.in_order == tuple(names)
    assert (args.q, args.k, args.v) == ("q", "k", "v")
    assert [getattr(args.scoring, field.name) for field in fields(Scoring)] == [field.name for field in fields(Scoring)]


def test_the_backward_alone_has_more():
    names = tuple(argument.name for argument in kp.attention_backward.default._schema.arguments)
    backward = AttentionArgs.of(SimpleNamespace(target=kp.attention_backward.default, args=names)).backward
    assert (backward.grad, backward.result, backward.statistics) == ("grad", "result", "statistics")
    assert backward.factors == ("q_factor", "k_factor")
