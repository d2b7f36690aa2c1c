"""What an `autograd.Function` returns of its argument's memory keeps the function's backward."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.spine import compiled

# torch 2.9: Dynamo makes an instance of every autograd.Function it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.1


class Identity(Scale):
    @staticmethod
    def forward(ctx, x):
        return x


class Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.t()

    @staticmethod
    def backward(ctx, grad):
        return grad.t() * 0.1


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x), x.exp()

    @staticmethod
    def backward(ctx, grad, _):
        return grad * 0.1


def both(function, x):
    h = x.exp()
    return function.apply(h), h


def both_of_a_part(function, x):
    h = x.exp()
    return function.apply(h[1:]), h


def two_views(function, x):
    h = function.apply(x.exp())
    return h[1:], h[:1]


def checkpointed(function, x):
    h = x.exp()
    return checkpoint(lambda a: function.apply(a), h, use_reentrant=False), h


PROGRAMS = {
    "both": both,
    "both of a part": both_of_a_part,
    "two views": two_views,
    "a view beside the base": lambda function, x: (lambda h: (function.apply(h)[1:], h))(x.exp()),
    "twice": lambda function, x: (lambda h: (function.apply(h), function.apply(h)))(x.exp()),
    "chained": lambda function, x: (lambda h: (function.apply(function.apply(h)), h))(x.exp()),
    "beside what is the base here and a copy in aot_eager": lambda function, x: (
        lambda h: (function.apply(h), torch.dropout(h, 0.9, False))
    )(x.exp()),
    "beside a detached view": lambda function, x: (lambda h: (function.apply(h), h.detach()))(x.exp()),
    "of an input": lambda function, x: (function.apply(x), x),
    "a view of one of an input": lambda function, x: (function.apply(x)[1:],),
    "chained, of an input": lambda function, x: (function.apply(function.apply(x)),),
    "checkpointed": checkpointed,
    "in a checkpointed region": lambda function, x: checkpoint(lambda a: both(function, a), x, use_reentrant=False),
}


def gradient(fn, x):
    x = x.clone().requires_grad_()
    results = fn(x)
    weighted = [
        (r * torch.arange(1, r.numel() + 1).reshape(r.shape) * n).sum()
        for n, r in enumerate(results, 1)
        if r.requires_grad
    ]
    sum(weighted).backward()
    return x.grad, [r.requires_grad for r in results]


@pytest.mark.quick("both-Scale", "Transpose")
@pytest.mark.parametrize("function", [Scale, Identity, Transpose], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_backward_is_that_of_the_function(function, program):
    def fn(x):
        return PROGRAMS[program](function, x)

    mine = compiled(fn)
    for size in (3, 4):
        x = torch.randn(size, 3)
        (grad, flags), (expected, expected_flags) = gradient(mine, x), gradient(fn, x)
        torch.testing.assert_close(grad, expected)
        assert flags == expected_flags


def test_one_of_several_results():
    def fn(x):
        h = x.exp()
        return *Both.apply(h), h

    x = torch.randn(3, 3)
    torch.testing.assert_close(gradient(compiled(fn), x)[0], gradient(fn, x)[0])


@pytest.mark.quick(
    "both-Scale-cpu", "both-Transpose-xla", "both of a part-Transpose-cpu", "a view beside the base-Scale-xla",
    "twice-Transpose-cpu", "chained-Transpose-xla",
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("function", [Scale, Transpose], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", ["both", "both of a part", "a view beside the base", "twice", "chained"])
def test_results_share_memory_as_in_eager(program, function, device):
    """A write to one shows in the others, at the same places."""

    def fn(x):
        return PROGRAMS[program](function, x)

    x = torch.arange(9.0).reshape(3, 3).cos()
    mine = [r.detach() for r in compiled(fn)(x.to(device).requires_grad_())]
    eager = [r.detach() for r in fn(x.clone().requires_grad_())]
    for number in range(len(eager)):
        for results in (mine, eager):
            results[number][-1:] += number + 1
        for result, expected in zip(mine, eager, strict=True):
            torch.testing.assert_close(result.cpu(), expected)


def test_pieces_that_do_not_overlap_are_not_copied_on_xla():
    x = torch.randn(4, 3, device="xla", requires_grad=True)
    pieces = compiled(lambda x: x.exp().chunk(2))(x)
    assert [type(piece.grad_fn).__name__ for piece in pieces] == ["CompiledFunctionBackward"] * 2


@pytest.mark.parametrize(
    "program",
    [
        lambda x: Scale.apply(x),
        lambda x: Scale.apply(x)[1:],
        lambda x: Scale.apply(Scale.apply(x)),
        lambda x: Scale.apply(x[1:]).t(),
        lambda x: Both.apply(x)[0],
        lambda x: Both.apply(x)[0][1:],
    ],
)
def test_results_share_the_memory_of_an_input_as_in_eager(program):
    x = torch.randn(3, 3, requires_grad=True)
    result = compiled(program)(x).detach()
    assert result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert result.storage_offset() == program(x).storage_offset()
    assert result.stride() == program(x).stride()
