"""RewriteStemConvolution: what it fires on, what it leaves alone, and that values, gradients and strides stay."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.utils import _pytree as pytree

from kp_dynamo.passes.rewrite_stem_convolution import RewriteStemConvolution
from tests.graphs import applied, graph_text, trace_inference, trace_joint

F64 = torch.float64


def tensors(*sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, dtype=F64, generator=generator) for size in sizes]


def test_rows_of_the_kernel_become_channels():
    gm = trace_inference(lambda x, w: F.conv2d(x, w, stride=2, padding=1), *tensors((2, 3, 8, 9), (4, 3, 3, 3)))
    assert applied(RewriteStemConvolution(), gm).rewritten == 1
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f64[2, 3, 8, 9] = input
arg1_1: f64[4, 3, 3, 3] = input
constant_pad_nd_default: f64[2, 3, 10, 9] = aten.constant_pad_nd.default(arg0_1, [0, 0, 1, 1])
reshape_default: f64[2, 3, 5, 2, 9] = aten.reshape.default(constant_pad_nd_default, [2, 3, 5, 2, 9])
slice_tensor: f64[2, 3, 4, 2, 9] = aten.slice.Tensor(reshape_default, 2, 0, 4)
select_int: f64[2, 3, 4, 9] = aten.select.int(slice_tensor, 3, 0)
slice_tensor_1: f64[2, 3, 4, 2, 9] = aten.slice.Tensor(reshape_default, 2, 0, 4)
select_int_1: f64[2, 3, 4, 9] = aten.select.int(slice_tensor_1, 3, 1)
slice_tensor_2: f64[2, 3, 4, 2, 9] = aten.slice.Tensor(reshape_default, 2, 1, 5)
select_int_2: f64[2, 3, 4, 9] = aten.select.int(slice_tensor_2, 3, 0)
stack_default: f64[2, 3, 3, 4, 9] = aten.stack.default([select_int, select_int_1, select_int_2], 2)
reshape_default_1: f64[2, 9, 4, 9] = aten.reshape.default(stack_default, [2, 9, 4, 9])
reshape_default_2: f64[4, 9, 1, 3] = aten.reshape.default(arg1_1, [4, 9, 1, 3])
convolution_default: f64[2, 4, 4, 5] = aten.convolution.default(reshape_default_1, reshape_default_2, None, [1, 2], [0, 1], [1, 1], False, [0, 0], 1)
return (convolution_default,)""",  # noqa: E501
    )


# Image, weight, stride, padding.
STEMS = {
    "ResNet": ((2, 3, 32, 36), (8, 3, 7, 7), 2, 3),
    "MobileNet": ((2, 3, 32, 30), (8, 3, 3, 3), 2, 1),
    "ConvNeXt": ((2, 3, 32, 36), (8, 3, 4, 4), 4, 0),
    "with a rest": ((1, 3, 33, 31), (8, 3, 3, 3), 2, 1),
    "rows that nothing reads": ((1, 1, 13, 9), (2, 1, 2, 2), 4, 0),
    "wide padding": ((1, 2, 5, 6), (2, 2, 3, 3), 2, 5),
    "strides that differ": ((1, 2, 11, 9), (2, 2, 3, 5), (3, 1), (2, 0)),
    "one row of results": ((1, 4, 7, 7), (2, 4, 7, 7), 2, 0),
    "a kernel of one column": ((1, 4, 9, 7), (2, 4, 3, 1), (2, 2), (1, 0)),
}


@pytest.mark.quick("True", "False-with a rest")
@pytest.mark.parametrize("name", STEMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_gradients_and_strides_stay(name, has_bias):
    image, weight, stride, padding = STEMS[name]
    x, *parameters = tensors(image, weight, *([weight[:1]] if has_bias else []))
    parameters = [p.requires_grad_() for p in parameters]

    def stem(x, w, *b):
        return F.conv2d(x, w, *b, stride=stride, padding=padding)

    gm = trace_joint(lambda *args: stem(*args).sin(), x, *parameters)
    given = [t.detach() for t in (x, *parameters)]
    tangent = torch.randn(stem(*given).shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    before = [t for t in pytree.tree_leaves(gm(given, [tangent])) if t is not None]
    assert applied(RewriteStemConvolution(), gm).rewritten == 2
    after = [t for t in pytree.tree_leaves(gm(given, [tangent])) if t is not None]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert [t.stride() for t in after] == [t.stride() for t in before]
    stacks = [n for n in gm.graph.nodes if n.target is torch.ops.aten.stack.default]
    assert len(stacks) == 1  # the backward reads those of the forward


def test_infinities_stay_where_they_are():
    x, weight = tensors((1, 3, 16, 16), (4, 3, 7, 7))
    x[0, 1, 5, 6], x[0, 2, 11, 3] = torch.inf, torch.nan
    gm = trace_inference(lambda x, w: F.conv2d(x, w, stride=2, padding=3), x, weight)
    assert applied(RewriteStemConvolution(), gm).rewritten == 1
    (found,) = gm(x, weight)
    torch.testing.assert_close(found, F.conv2d(x, weight, stride=2, padding=3), equal_nan=True)


OTHERS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "without stride": (F.conv2d, ((1, 3, 8, 8), (2, 3, 3, 3))),
    "many channels": (lambda x, w: F.conv2d(x, w, stride=2), ((1, 5, 8, 8), (2, 5, 3, 3))),
    "dilated": (lambda x, w: F.conv2d(x, w, stride=2, dilation=2), ((1, 3, 8, 8), (2, 3, 3, 3))),
    "in groups": (lambda x, w: F.conv2d(x, w, stride=2, groups=2), ((1, 4, 8, 8), (2, 2, 3, 3))),
    "a kernel far longer than the stride": (lambda x, w: F.conv2d(x, w, stride=2), ((1, 3, 20, 20), (2, 3, 9, 9))),
    "one stride for both": (lambda x, w: torch.conv2d(x, w, None, (2,)), ((1, 3, 8, 8), (2, 3, 3, 3))),
    "one row": (lambda x, w: F.conv2d(x, w, stride=2), ((1, 3, 8, 8), (2, 3, 1, 3))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), ((1, 2, 4, 4), (2, 1, 3, 3))),
    "of a sequence": (lambda x, w: F.conv1d(x, w, stride=2), ((1, 3, 8), (2, 3, 3))),
    "channels last": (
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, stride=2),
        ((2, 3, 8, 8), (4, 3, 3, 3)),
    ),
    "empty": (lambda x, w: F.conv2d(x, w, stride=2), ((0, 3, 8, 8), (4, 3, 3, 3))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay(name):
    fn, sizes = OTHERS[name]
    gm = trace_inference(fn, *tensors(*sizes))
    text = graph_text(gm)
    assert applied(RewriteStemConvolution(), gm).rewritten == 0
    assert graph_text(gm) == text


def test_a_gradient_of_the_image_is_left_alone():
    x, weight = (t.requires_grad_() for t in tensors((1, 3, 8, 8), (2, 3, 3, 3)))
    gm = trace_joint(lambda x, w: F.conv2d(x, w, stride=2), x, weight)
    assert applied(RewriteStemConvolution(), gm).rewritten == 1


@pytest.mark.quick("cpu-aggressive", "xla-balanced")
@pytest.mark.parametrize("level", ["balanced", "aggressive"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_model_trains_with_it(level, device):
    torch.manual_seed(0)
    stem, norm = torch.nn.Conv2d(3, 8, 7, 2, 3), torch.nn.BatchNorm2d(8)
    x = torch.randn(2, 3, 20, 24)
    parameters = [*stem.parameters(), *norm.parameters()]

    def loss(x: Tensor) -> Tensor:
        return F.max_pool2d(norm(stem(x)).relu(), 2).square().mean()

    expected = torch.autograd.grad(loss(x), parameters)
    for module in (stem, norm):
        module.to(device)
    parameters = [*stem.parameters(), *norm.parameters()]
    options = {"level": level, "precision": "float32"}
    found = torch.autograd.grad(torch.compile(loss, backend="kp_tpu", options=options)(x.to(device)), parameters)
    torch.testing.assert_close([t.cpu() for t in found], list(expected), rtol=1e-5, atol=1e-5)


def test_a_stride_that_varies_is_left_alone():
    weight = torch.randn(4, 3, 3, 3)

    def run(x: Tensor, y: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=y.shape[0])

    x = torch.randn(2, 3, 24, 24)
    step = torch.compile(run, backend="kp_tpu", options={"precision": "float32"}, dynamic=True)
    for size in (8, 4):
        y = torch.zeros(size)
        torch.testing.assert_close(step(x, y), run(x, y), rtol=1e-5, atol=1e-4)


def test_a_gradient_before_the_convolution_of_the_same_image():
    """`torch.func.grad` in the graph: the rows were inserted at the convolution, after the gradient that reads them."""

    def step(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda w: (F.conv2d(x, w, stride=2, padding=1) * t).sum())(w)
        return F.conv2d(x, w - gradient, stride=2, padding=1)

    args = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(2, 4, 5, 5)
    run = torch.compile(step, backend="kp_tpu", options={"precision": "float32"})
    torch.testing.assert_close(run(*args), step(*args), rtol=1e-4, atol=1e-4)
