"""Writes through a boolean mask stay in the program, with eager's values, gradients and errors."""

import pytest
import torch
from torch import nn

from kp_dynamo import mark_sequence
from tests.spine import DEVICES, assert_same, check_gradients_like_eager, check_like_eager, compiled, on

X = torch.arange(40.0).reshape(2, 5, 4).cos()
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
ROW = torch.tensor([3.0, -1.0, 0.5, 2.0])


def assigned(x, index, value):
    x = x * 1
    x[index] = value
    return x.sin()


WRITES = {
    "a number": lambda x, m, v: assigned(x, ~m, 0) * v,
    "each element": lambda x, m, v: assigned(x, m.unsqueeze(-1).repeat(1, 1, 4), 0.5) * v,
    "a tensor without dimensions": lambda x, m, v: assigned(x, m, v[0]),
    "a row": lambda x, m, v: assigned(x, m, v),
    "a row with leading dimensions": lambda x, m, v: assigned(x, m, v[None, None]),
    "a row of each": lambda x, m, v: assigned(x, (slice(None), m[0]), v[:2, None, None].expand(2, 1, 4)),
    "behind a number": lambda x, m, v: assigned(x, (1, m[0]), v),
    "before a slice": lambda x, m, v: assigned(x, (m, slice(1, 3)), v[:2]),
    "behind an ellipsis": lambda x, m, v: assigned(x, (..., m[0, :4]), v[0]),
    "behind a new dimension": lambda x, m, v: assigned(x, (None, m), v),
    "through a view": lambda x, m, v: (y := x * 1, y[:, ::2].__setitem__(m[:, ::2], v), y.sin())[-1],
    "no True": lambda x, m, v: assigned(x, m & ~m, v),
    "added": lambda x, m, v: torch.index_put(x, (m,), v, accumulate=True).sin(),
    "index_put": lambda x, m, v: x.index_put((m,), v.sum()).sin() + x,
    "index_put_": lambda x, m, v: (y := x * 1).index_put_((m,), v).sin() * y,
}


@pytest.mark.parametrize("name", WRITES)
def test_values_and_gradients_are_eagers(name):
    check_like_eager(WRITES[name], X, MASK, ROW, strict=True)
    check_gradients_like_eager(
        WRITES[name], X.clone().requires_grad_(), MASK, ROW.clone().requires_grad_(), strict=True
    )


def test_the_argument_itself_is_written():
    def write(x, m):
        x[m] = 7
        return x.sum()

    for device in DEVICES:
        x, m = on(device, (X.clone(), MASK))
        compiled(write, strict=True)(x, m)
        assert_same(x, X.masked_fill(MASK[..., None], 7))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype):
    check_like_eager(
        lambda x, m, v: (x := x.clone()).__setitem__(m, v) or x, X.to(dtype), MASK, ROW.to(dtype), strict=True
    )
    check_like_eager(lambda x, m: (x := x.clone()).__setitem__(m, 1) or x, X.to(dtype), MASK, strict=True)


@pytest.mark.parametrize("how", [{"dynamic": True}, {"buckets": [4, 8]}], ids=str)
def test_lengths_that_vary(how):
    run = compiled(lambda x, m, v: assigned(x, m, v), strict=True, **how)
    for length in (5, 7, 3):
        x, m = mark_sequence(torch.randn(2, length, 4), 1), mark_sequence(torch.rand(2, length) > 0.5, 1)
        assert_same(run(x, m, ROW), assigned(x, m, ROW))


def test_a_value_for_each_true_is_left_alone():
    check_like_eager(lambda x, m, v: assigned(x, m, v), X, MASK, torch.randn(7, 4))
    with pytest.raises(Exception, match="shape mismatch"):
        compiled(lambda x, m, v: assigned(x, m, v))(X, MASK, torch.randn(6, 4))


def test_a_learned_token_in_a_module():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(ROW.clone())

        def forward(self, x, m):
            x = x.tanh()
            x[m] = self.token.to(x.dtype)
            return x

    module = Masked()
    compiled(module, fullgraph=True, strict=True)(X, MASK).sum().backward()
    assert_same(module.token.grad, torch.full((4,), float(MASK.sum())))
