"""`as_strided`, and writes to parts of one tensor: places in memory, as eager's tensors lie."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from kp_dynamo import mark_sequence
from tests.spine import DEVICES, assert_same, check_gradients_like_eager, compiled

PLACES = {
    "rows with gaps": ((2, 2), (4, 1), 2),
    "every third": ((5,), (3,), 1),
    "a diagonal": ((4,), (5,), 0),
    "columns": ((2, 3), (1, 5), 0),
    "blocks": ((2, 2, 2), (8, 4, 1), 1),
    "nothing": ((0, 2), (2, 1), 0),
    "all": ((16,), (1,), 0),
}
QUICK = ("rows with gaps", "columns")
LAYOUTS = {
    "contiguous": lambda: torch.arange(16.0).view(4, 4),
    "transposed": lambda: torch.arange(16.0).view(4, 4).t(),
    "channels last": lambda: torch.arange(16.0).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last),
    "permuted": lambda: torch.arange(16.0).view(2, 2, 4).permute(2, 0, 1),
}


def read(x, place):
    return x.as_strided(*place) * 2


def of_a_result(x, place):
    return (x * 2).transpose(0, -1).as_strided(*place) + 1


def written(x, place):
    x.as_strided(*place).fill_(-1)
    return x + 0


def scattered(x, place):
    return torch.as_strided_scatter(x * 2, torch.full(place[0], -1.0), *place)


def scattered_in_a_view(x, place):
    return torch.as_strided_scatter((x * 2).transpose(0, -1), torch.full(place[0], -1.0), *place) * 1


@pytest.mark.quick(
    "read-places0-contiguous", "of_a_result-places2-transposed", "written-places4-transposed",
    "scattered_in_a_view-places8-transposed",
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("fn", "places"),
    [
        pytest.param(fn, places, marks=[pytest.mark.slow] if len(places) > len(QUICK) else [])
        for fn in (read, of_a_result, written, scattered, scattered_in_a_view)
        for places in (QUICK, tuple(PLACES))
    ],
)
def test_places_in_memory(fn, places, layout):
    for place in map(PLACES.get, places):
        torch._dynamo.reset()
        mine, eager = layout(), layout()
        assert_same((compiled(fn)(mine, place), mine), (fn(eager, place), eager))


def test_gradients_of_places():
    check_gradients_like_eager(lambda x: read(x, ((2, 3), (4, 2))), torch.randn(3, 5, requires_grad=True))
    # With an offset, of an argument on the CPU alone.
    x = torch.randn(3, 5, requires_grad=True)
    mine, eager = (torch.autograd.grad(fn(x, ((2, 3), (4, 2), 1)).cos().sum(), x) for fn in (compiled(read), read))
    assert_same(mine, eager)
    check_gradients_like_eager(lambda x: of_a_result(x, ((4, 2), (2, 1), 0)), torch.randn(5, 3, requires_grad=True))


@pytest.mark.quick("0-padded", "1-exact")
@pytest.mark.parametrize("options", [{}, {"buckets": [8]}], ids=["exact", "padded"])
@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_one_tensor_are_written_to(dim, options):
    def fn(x, y):
        x.mul_(2)
        y.add_(1)
        return x.sum()

    run = compiled(fn, **options)
    for length in (4, 6, 7):
        mine, eager = torch.arange(4.0 * length).view(2, length, 2), torch.arange(4.0 * length).view(2, length, 2)
        parts = [mark_sequence(part, 1) if options else part for part in mine.tensor_split(2, dim)]
        assert_same((run(*parts), mine), (fn(*eager.tensor_split(2, dim)), eager))


@pytest.mark.parametrize("x", [torch.arange(24.0).view(4, 6)[:, :4], torch.arange(24.0).view(6, 4)[1:5]])
def test_memory_that_no_tensor_of_the_graph_holds_is_refused(x):
    with pytest.raises(BackendCompilerFailed, match=r"addresses the memory of a tensor.*clone"):
        compiled(read)(x, ((2, 2), (4, 1), 2))


@pytest.mark.parametrize("size", [3, 14])
def test_memory_around_a_view_whose_length_varies_is_refused(size):
    """The 15 elements of the view begin at 1."""
    x = torch.arange(17.0)[1:16]
    mark_sequence(x, 0)
    with pytest.raises(BackendCompilerFailed, match="begins before the tensor, or ends after it"):
        compiled(lambda x: x[1:].as_strided((size,), (1,), 0 if size == 3 else 3) + 1)(x)


@pytest.mark.parametrize("write", [torch.Tensor.neg_, lambda x: x.copy_(x.flip(0)), lambda x: x[0].zero_()])
def test_places_of_an_argument_that_was_written_to(write):
    """The graph has a new value for it, which begins its memory; the argument lies behind other elements."""

    def fn(x):
        write(x)
        return x.as_strided((2, 2), (3, 1), 1) * 2

    mine, eager = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
    assert_same((compiled(fn)(mine), mine), (fn(eager), eager))
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match=r"addresses the memory of a tensor"):
        compiled(fn)(torch.arange(12.0).view(3, 4)[1:])


@pytest.mark.quick("written")
@pytest.mark.parametrize("write", [lambda x: None, lambda x: x.add_(1)], ids=["read", "written"])
def test_a_named_offset_of_an_xla_tensor_is_refused(write):
    """torch_xla 2.9 gives a view's offset as 0: nobody knows where its memory begins."""

    def fn(x, place):
        write(x)
        return x.as_strided(*place) * 2

    view, eager = torch.arange(12.0).to("xla")[1:], torch.arange(12.0)[1:]
    assert_same(compiled(fn)(view, ((2, 2), (3, 1))), fn(eager, ((2, 2), (3, 1))))
    for offset in (0, 1):
        torch._dynamo.reset()
        with pytest.raises(BackendCompilerFailed, match="storage offset of 0 for every XLA tensor"):
            compiled(fn)(view, ((2, 2), (3, 1), offset))
    own = compiled(lambda x: (x * 2).as_strided((2, 2), (3, 1), 1) * 1)
    assert_same(own(view), (eager * 2).as_strided((2, 2), (3, 1), 1))


def test_a_view_of_an_xla_tensor_at_a_named_offset_is_refused():
    """AOTAutograd takes it behind the program, where torch_xla gives its gradient other places."""
    x = torch.arange(10.0).to("xla")[1:-1].detach().requires_grad_()
    for offset in ((0,), ()):
        with pytest.raises(BackendCompilerFailed, match="storage offset of 0 for every XLA tensor"):
            compiled(lambda x, offset=offset: x.as_strided((3,), (2,), *offset))(x)
    assert compiled(lambda x: x.as_strided((3,), (2,)) * 1)(x).tolist() == [1, 3, 5]


@pytest.mark.quick("cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_strides_that_vary_are_those_of_the_caller(device):
    """On the device an argument is contiguous: its strides are no answer there."""

    def ask(x):
        return x * x.stride(1) + x.stride(0)

    def gradient(run, x):
        run(x).backward(torch.tensor([[1.0, 2], [3, 4]]))
        return x.grad

    run = compiled(ask, dynamic=True)
    taken = compiled(lambda x: x.as_strided((2, 2), (2, 1), 1).clone(), dynamic=True)
    for length in (7, 10):
        x = torch.randn(8, length).t() if device == "cpu" else torch.randn(length, 8)
        assert_same(run(x.to(device)).cpu(), ask(x))
        x = torch.randn(8, length, 3).transpose(0, -1)
        mine, eager = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
        assert_same(gradient(taken, mine), gradient(lambda x: x.as_strided((2, 2), (2, 1), 1).clone(), eager))
