"""RewritePatchConvolution: what it fires on, what it leaves alone, and that values, gradients and strides stay."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.utils import _pytree as pytree

from kp_dynamo.passes.rewrite_patch_convolution import RewritePatchConvolution
from tests.graphs import applied, graph_text, trace_inference, trace_joint

F64 = torch.float64


def tensors(*sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, dtype=F64, generator=generator).requires_grad_() for size in sizes]


def patches(x: Tensor, w: Tensor, *b: Tensor) -> Tensor:
    return F.conv2d(x, w, *b, stride=w.shape[2:])


def test_a_patch_embedding_is_a_matmul():
    gm = trace_inference(patches, *tensors((2, 3, 16, 24), (4, 3, 8, 8), (4,)))
    assert applied(RewritePatchConvolution(), gm).rewritten == 1
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f64[2, 3, 16, 24] = input
arg1_1: f64[4, 3, 8, 8] = input
arg2_1: f64[4] = input
reshape_default: f64[2, 3, 2, 8, 3, 8] = aten.reshape.default(arg0_1, [2, 3, 2, 8, 3, 8])
permute_default: f64[2, 2, 3, 3, 8, 8] = aten.permute.default(reshape_default, [0, 2, 4, 1, 3, 5])
reshape_default_1: f64[12, 192] = aten.reshape.default(permute_default, [-1, 192])
reshape_default_2: f64[4, 192] = aten.reshape.default(arg1_1, [4, -1])
t_default: f64[192, 4] = aten.t.default(reshape_default_2)
addmm_default: f64[12, 4] = aten.addmm.default(arg2_1, reshape_default_1, t_default)
reshape_default_3: f64[2, 2, 3, 4] = aten.reshape.default(addmm_default, [2, 2, 3, 4])
permute_default_1: f64[2, 4, 2, 3] = aten.permute.default(reshape_default_3, [0, 3, 1, 2])
clone_default: f64[2, 4, 2, 3] = aten.clone.default(permute_default_1, memory_format=torch.contiguous_format)
return (clone_default,)""",
    )


@pytest.mark.parametrize(
    "sizes", [((2, 3, 16, 24), (4, 3, 8, 8)), ((1, 1, 8, 9), (2, 1, 8, 9)), ((2, 2, 32, 16), (3, 2, 16, 8))]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_gradients_and_strides_stay(sizes, has_bias):
    inputs = tensors(*sizes, *([sizes[1][:1]] if has_bias else []))
    gm = trace_joint(lambda *args: patches(*args).sin(), *inputs)
    given = [t.detach() for t in inputs]
    tangent = torch.randn(patches(*given).shape, dtype=F64, generator=torch.Generator().manual_seed(1))
    before = pytree.tree_leaves(gm(given, [tangent]))
    assert applied(RewritePatchConvolution(), gm).rewritten == 2
    after = pytree.tree_leaves(gm(given, [tangent]))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    assert [t.stride() for t in after] == [t.stride() for t in before]


OTHERS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "overlapping": (lambda x, w: F.conv2d(x, w, stride=4), ((1, 1, 16, 16), (2, 1, 8, 8))),
    "padded": (lambda x, w: F.conv2d(x, w, stride=8, padding=8), ((1, 1, 16, 16), (2, 1, 8, 8))),
    "dilated": (lambda x, w: F.conv2d(x, w, stride=8, dilation=2), ((1, 1, 32, 32), (2, 1, 8, 8))),
    "in groups": (lambda x, w: F.conv2d(x, w, stride=8, groups=2), ((1, 2, 16, 16), (2, 1, 8, 8))),
    "with a rest": (patches, ((1, 1, 17, 16), (2, 1, 8, 8))),
    "small": (patches, ((1, 1, 16, 16), (2, 1, 4, 4))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=8), ((1, 2, 2, 2), (2, 1, 8, 8))),
    "of a sequence": (lambda x, w: F.conv1d(x, w, stride=8), ((1, 1, 16), (2, 1, 8))),
    "channels last": (
        lambda x, w: patches(x.contiguous(memory_format=torch.channels_last), w),
        ((2, 3, 16, 16), (4, 3, 8, 8)),
    ),
    "empty": (patches, ((0, 3, 16, 16), (4, 3, 8, 8))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay(name):
    fn, sizes = OTHERS[name]
    gm = trace_joint(fn, *tensors(*sizes))
    text = graph_text(gm)
    assert applied(RewritePatchConvolution(), gm).rewritten == 0
    assert graph_text(gm) == text


@pytest.mark.parametrize("level", ["balanced", "aggressive"])
def test_a_vision_transformer_trains_with_it(level):
    torch.manual_seed(0)
    embed = torch.nn.Conv2d(3, 16, 8, 8)
    head = torch.nn.Linear(16, 4)

    def loss(x: Tensor) -> Tensor:
        return head(embed(x).flatten(2).transpose(1, 2)).square().mean()

    x = torch.randn(2, 3, 16, 24)
    parameters = [*embed.parameters(), *head.parameters()]
    expected = torch.autograd.grad(loss(x), parameters)
    options = {"level": level, "precision": "float32"}
    found = torch.autograd.grad(torch.compile(loss, backend="kp_tpu", options=options)(x), parameters)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_of_the_gradient_of_a_bias_alone_no_matmul_is_left():
    x, w, b = tensors((2, 3, 16, 24), (4, 3, 8, 8), (4,))
    gm = trace_joint(patches, x.detach(), w.detach(), b)
    assert applied(RewritePatchConvolution(), gm).rewritten == 2
    assert [n.name for n in gm.graph.nodes if not n.users and n.op == "call_function"] == []
    assert sum(n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for n in gm.graph.nodes) == 1


def test_a_stride_that_varies_is_left_alone():
    weight = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def run(x: Tensor, y: Tensor) -> Tensor:
        return F.conv2d(x, weight, stride=y.shape[0])

    x = torch.ones(2, 3, 24, 24)
    step = torch.compile(run, backend="kp_tpu", options={"precision": "float32", "strict": True}, dynamic=True)
    for size in (8, 4):
        torch.testing.assert_close(step(x, torch.zeros(size)), run(x, torch.zeros(size)), rtol=1e-5, atol=1e-4)
