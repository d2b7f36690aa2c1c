"""FuseLinearActivation: what it fires on, what it refuses and why, and what it does to values and gradients.

B, S are the sizes of a batch and a sequence, K and N those of a Linear: x [B, S, K], w [N, K], b [N].
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.activations import ACT2FN

from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from tests.graphs import graph_text, trace_inference, trace_joint

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
FUSED = (torch.ops.kp.linear_act.default, torch.ops.kp.linear_act_train.default)

# Every Hugging Face activation that is one of ours, and some that are not.
HUGGING_FACE = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "gelu_10": "gelu",  # clipped: the clamp stays behind the op
    "relu2": "relu",  # squared
}
NOT_OURS = ("quick_gelu", "mish", "laplace", "leaky_relu", "relu6", "linear")


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 4, requires_grad=True)


@pytest.fixture
def w() -> Tensor:
    return torch.randn(8, 4, requires_grad=True)


@pytest.fixture
def b() -> Tensor:
    return torch.randn(8, requires_grad=True)


@pytest.fixture
def u() -> Tensor:
    return torch.randn(8, 4, requires_grad=True)


def fuse(gm: fx.GraphModule) -> tuple[int, tuple[tuple[str, str], ...]]:
    """(rewritten, refused); the graph stays well formed, and a second run leaves it alone."""
    report = FuseLinearActivation()(gm)
    gm.graph.lint()
    gm.recompile()
    text = graph_text(gm)
    again = FuseLinearActivation()(gm)
    assert again.rewritten == 0
    assert graph_text(gm) == text
    return report.rewritten, report.refused


def fused_nodes(gm: fx.GraphModule) -> Iterator[fx.Node]:
    return (node for node in gm.graph.nodes if node.target in FUSED)


def refusals(fn: Callable[..., object], *args: Tensor, trace=trace_inference) -> list[str]:
    """The reasons; nothing was rewritten."""
    gm = trace(fn, *args)
    before = graph_text(gm)
    rewritten, refused = fuse(gm)
    assert rewritten == 0
    assert graph_text(gm) == before
    return [reason for _, reason in refused]


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.double() - reference).norm() / reference.norm())


# Fires.


def test_linear_and_gelu(x, w, b):
    gm = trace_inference(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 3, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8] = input
view: f32[6, 4] = aten.view.default(arg0_1, [6, 4])
t: f32[4, 8] = aten.t.default(arg1_1)
addmm: f32[6, 8] = aten.addmm.default(arg2_1, view, t)
view_1: f32[2, 3, 8] = aten.view.default(addmm, [2, 3, 8])
gelu: f32[2, 3, 8] = aten.gelu.default(view_1)
return (gelu,)""",
    )
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 3, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8] = input
view: f32[6, 4] = aten.view.default(arg0_1, [6, 4])
t: f32[4, 8] = aten.t.default(arg1_1)
linear_act_default: f32[6, 8] = kp.linear_act.default(view, t, arg2_1, gelu)
view_default: f32[2, 3, 8] = aten.view.default(linear_act_default, [2, 3, 8])
return (view_default,)""",
    )


def test_spelled_out_gelu(x, w, b):
    gm = trace_inference(lambda x, w, b: ACT2FN["gelu_new"](F.linear(x, w, b)), x, w, b)
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 3, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8] = input
view: f32[6, 4] = aten.view.default(arg0_1, [6, 4])
t: f32[4, 8] = aten.t.default(arg1_1)
addmm: f32[6, 8] = aten.addmm.default(arg2_1, view, t)
view_1: f32[2, 3, 8] = aten.view.default(addmm, [2, 3, 8])
mul: f32[2, 3, 8] = aten.mul.Tensor(view_1, 0.5)
pow_1: f32[2, 3, 8] = aten.pow.Tensor_Scalar(view_1, 3.0)
mul_1: f32[2, 3, 8] = aten.mul.Tensor(pow_1, 0.044715)
add: f32[2, 3, 8] = aten.add.Tensor(view_1, mul_1)
mul_2: f32[2, 3, 8] = aten.mul.Tensor(add, 0.7978845608028654)
tanh: f32[2, 3, 8] = aten.tanh.default(mul_2)
add_1: f32[2, 3, 8] = aten.add.Tensor(tanh, 1.0)
mul_3: f32[2, 3, 8] = aten.mul.Tensor(mul, add_1)
return (mul_3,)""",
    )
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 3, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8] = input
view: f32[6, 4] = aten.view.default(arg0_1, [6, 4])
t: f32[4, 8] = aten.t.default(arg1_1)
linear_act_default: f32[6, 8] = kp.linear_act.default(view, t, arg2_1, gelu_tanh)
view_default: f32[2, 3, 8] = aten.view.default(linear_act_default, [2, 3, 8])
return (view_default,)""",
    )


def test_bias_after_the_views(x, w, b):
    gm = trace_inference(lambda x, w, b: F.relu(x @ w.t() + b), x, w, b)
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 3, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8] = input
t: f32[4, 8] = aten.t.default(arg1_1)
view: f32[6, 4] = aten.view.default(arg0_1, [6, 4])
linear_act_default: f32[6, 8] = kp.linear_act.default(view, t, arg2_1, relu)
view_default: f32[2, 3, 8] = aten.view.default(linear_act_default, [2, 3, 8])
return (view_default,)""",
    )


def test_gated(x, w, u):
    gm = trace_inference(lambda x, w, u: F.linear(x, u) * F.silu(F.linear(x, w)), x, w, u)
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 3, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8, 4] = input
t: f32[4, 8] = aten.t.default(arg2_1)
view: f32[6, 4] = aten.view.default(arg0_1, [6, 4])
mm: f32[6, 8] = aten.mm.default(view, t)
t_1: f32[4, 8] = aten.t.default(arg1_1)
view_1: f32[6, 4] = aten.view.default(arg0_1, [6, 4])
linear_act_default: f32[6, 8] = kp.linear_act.default(view_1, t_1, None, silu, multiplier=mm)
view_default: f32[2, 3, 8] = aten.view.default(linear_act_default, [2, 3, 8])
return (view_default,)""",
    )


def test_casts_become_the_out_dtype(x, w):
    def run(x, w):
        return F.gelu(F.linear(x.to(BF16), w.to(BF16)).float()).to(torch.float16)

    gm = trace_inference(run, x, w)
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 3, 4] = input
arg1_1: f32[8, 4] = input
_to_copy: bf16[2, 3, 4] = aten._to_copy.default(arg0_1, dtype=torch.bfloat16)
_to_copy_1: bf16[8, 4] = aten._to_copy.default(arg1_1, dtype=torch.bfloat16)
t: bf16[4, 8] = aten.t.default(_to_copy_1)
view: bf16[6, 4] = aten.view.default(_to_copy, [6, 4])
linear_act_default: f16[6, 8] = kp.linear_act.default(view, t, None, gelu, out_dtype=torch.float16)
view_default: f16[2, 3, 8] = aten.view.default(linear_act_default, [2, 3, 8])
return (view_default,)""",
    )


def test_joint_graph_saves_the_pre_activation(w, b):
    x = torch.randn(6, 4)
    gm = trace_joint(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        graph_text(gm),
        """\
primals_1: f32[6, 4] = input
primals_2: f32[8, 4] = input
primals_3: f32[8] = input
tangents_1: f32[6, 8] = input
t: f32[4, 8] = aten.t.default(primals_2)
linear_act_train_default = kp.linear_act_train.default(primals_1, t, primals_3, gelu)
getitem: f32[6, 8] = <built-in function getitem>(linear_act_train_default, 0)
getitem_1: f32[6, 8] = <built-in function getitem>(linear_act_train_default, 1)
gelu_backward: f32[6, 8] = aten.gelu_backward.default(tangents_1, getitem_1)
t_1: f32[8, 6] = aten.t.default(gelu_backward)
mm: f32[8, 4] = aten.mm.default(t_1, primals_1)
t_2: f32[4, 8] = aten.t.default(mm)
sum_1: f32[1, 8] = aten.sum.dim_IntList(gelu_backward, [0], True)
view: f32[8] = aten.view.default(sum_1, [8])
t_3: f32[8, 4] = aten.t.default(t_2)
return [getitem, None, t_3, view]""",
    )


def test_joint_graph_of_relu_needs_only_the_result(w, b):
    x = torch.randn(6, 4)
    gm = trace_joint(lambda x, w, b: F.relu(F.linear(x, w, b)), x, w, b)
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        graph_text(gm),
        """\
primals_1: f32[6, 4] = input
primals_2: f32[8, 4] = input
primals_3: f32[8] = input
tangents_1: f32[6, 8] = input
t: f32[4, 8] = aten.t.default(primals_2)
linear_act_default: f32[6, 8] = kp.linear_act.default(primals_1, t, primals_3, relu)
detach: f32[6, 8] = aten.detach.default(linear_act_default)
detach_1: f32[6, 8] = aten.detach.default(detach)
detach_2: f32[6, 8] = aten.detach.default(detach_1)
detach_3: f32[6, 8] = aten.detach.default(detach_2)
threshold_backward: f32[6, 8] = aten.threshold_backward.default(tangents_1, detach_3, 0)
t_1: f32[8, 6] = aten.t.default(threshold_backward)
mm: f32[8, 4] = aten.mm.default(t_1, primals_1)
t_2: f32[4, 8] = aten.t.default(mm)
sum_1: f32[1, 8] = aten.sum.dim_IntList(threshold_backward, [0], True)
view: f32[8] = aten.view.default(sum_1, [8])
t_3: f32[8, 4] = aten.t.default(t_2)
return [linear_act_default, None, t_3, view]""",
    )


def test_values_on_the_way_stay_for_the_backward_only(w, u):
    x = torch.randn(6, 4)
    gm = trace_joint(lambda x, w, u: F.silu(F.linear(x, w)) * F.linear(x, u), x, w, u)
    assert fuse(gm) == (1, ())
    assert_expected_inline(
        "\n".join(graph_text(gm).splitlines()[:14]),
        """\
primals_1: f32[6, 4] = input
primals_2: f32[8, 4] = input
primals_3: f32[8, 4] = input
tangents_1: f32[6, 8] = input
t: f32[4, 8] = aten.t.default(primals_2)
t_1: f32[4, 8] = aten.t.default(primals_3)
mm_1: f32[6, 8] = aten.mm.default(primals_1, t_1)
linear_act_train_default = kp.linear_act_train.default(primals_1, t, None, silu, multiplier=mm_1)
getitem: f32[6, 8] = <built-in function getitem>(linear_act_train_default, 0)
getitem_1: f32[6, 8] = <built-in function getitem>(linear_act_train_default, 1)
silu: f32[6, 8] = aten.silu.default(getitem_1)
mul_1: f32[6, 8] = aten.mul.Tensor(tangents_1, silu)
mul_2: f32[6, 8] = aten.mul.Tensor(tangents_1, mm_1)
t_2: f32[8, 6] = aten.t.default(mul_1)""",
    )


def test_autocast(x, w, b):
    def run(x, w, b):
        with torch.autocast("cpu", BF16):
            return ACT2FN["gelu_new"](F.linear(x, w, b))

    gm = trace_inference(run, x, w, b)
    assert fuse(gm) == (1, ())
    (node,) = fused_nodes(gm)
    assert node.meta["val"].dtype == BF16


@pytest.mark.parametrize("trace", [trace_inference, trace_joint])
@pytest.mark.parametrize("key", HUGGING_FACE)
def test_hugging_face_activation(trace, key, x, w, b):
    gm = trace(lambda x, w, b: ACT2FN[key](F.linear(x, w, b)), x, w, b)
    assert fuse(gm) == (1, ())
    (node,) = fused_nodes(gm)
    assert node.args[3] == HUGGING_FACE[key]


@pytest.mark.parametrize("key", NOT_OURS)
def test_another_activation_is_left_alone(key, x, w, b):
    assert refusals(lambda x, w, b: ACT2FN[key](F.linear(x, w, b)), x, w, b) == []


SPELLINGS = {
    "half last": lambda p: (p * (1 + torch.tanh(0.7978845608 * p * (1 + 0.044715 * p * p)))) * 0.5,
    "cube": lambda p: 0.5 * p * (1 + torch.tanh((p + 0.044715 * p * p * p) * (2 / torch.pi) ** 0.5)),
    "sum": lambda p: 0.5 * p + p * torch.tanh(0.79788456 * (p + 0.044715 * p**3)) / 2,
    "erf": lambda p: p * (torch.erf(p / 2**0.5) + 1) / 2,
    "swish": lambda p: torch.sigmoid(p) * p,
    "minus": lambda p: -(0 - torch.tanh(p)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name, x, w, b):
    def run(x, w, b):
        return SPELLINGS[name](F.linear(x, w, b))

    gm = trace_inference(run, x, w, b)
    assert fuse(gm) == (1, ())
    torch.testing.assert_close(gm(x, w, b)[0], run(x, w, b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "almost",
    [
        lambda p: 0.5 * p * (1 + torch.tanh(0.7978 * (p + 0.044715 * p**3))),  # another constant
        lambda p: 0.5 * p * (1 + torch.tanh(0.7978845608028654 * (p + 0.044715 * p**2))),  # another power
        lambda p: p * torch.sigmoid(p) * 2,
        lambda p: 0.5 * p * (1 + torch.erf(p)),
    ],
)
def test_almost_an_activation(almost, x, w, b):
    gm = trace_inference(lambda x, w, b: almost(F.linear(x, w, b)), x, w, b)
    fuse(gm)
    torch.testing.assert_close(gm(x, w, b)[0], almost(F.linear(x, w, b)), rtol=1e-6, atol=1e-6)
    assert "gelu" not in graph_text(gm)


def test_gate_of_another_shape_stays(x, w, b):
    gm = trace_inference(lambda x, w, b: F.silu(F.linear(x, w)) * b, x, w, b)
    assert fuse(gm) == (1, ())
    (node,) = fused_nodes(gm)
    assert "multiplier" not in node.kwargs


def test_gate_of_an_activation(w, u):
    x = torch.randn(6, 4)
    gm = trace_inference(lambda x, w, u: F.silu(F.linear(x, w)) * F.gelu(F.linear(x, u)), x, w, u)
    assert fuse(gm) == (2, ())
    expected = F.silu(F.linear(x, w)) * F.gelu(F.linear(x, u))
    torch.testing.assert_close(gm(x, w, u)[0], expected, rtol=1e-6, atol=1e-6)


# Refuses.


def test_refuses_a_second_user(x, w, b):
    def run(x, w, b):
        p = F.linear(x, w, b)
        return F.gelu(p) + p

    assert refusals(run, x, w, b) == ["view_1, before the activation, is also read by add"]
    assert refusals(run, x, w, b, trace=trace_joint) == ["view_1, before the activation, is also read by add"]


def test_refuses_two_activations_of_one_product(x, w, b):
    def run(x, w, b):
        p = F.linear(x, w, b)
        return F.gelu(p), F.relu(p)

    assert refusals(run, x, w, b) == ["view_1, before the activation, is also read by gelu"]


def test_refuses_a_value_on_the_way_with_a_second_user(x, w):
    def run(x, w):
        p = F.linear(x, w)
        s = torch.sigmoid(p)
        return p * s, s.sum()

    assert refusals(run, x, w) == ["sigmoid, before the activation, is also read by sum_1"]


def test_refuses_an_output(x, w, b):
    def run(x, w, b):
        p = F.linear(x, w, b)
        return F.gelu(p), p

    assert refusals(run, x, w, b) == ["view_1, before the activation, is an output of the graph"]


def test_refuses_a_product_that_the_backward_reads_without_its_bias(w, b):
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, p, b):
            ctx.save_for_backward(p)
            return torch.relu(p + b)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], grad.sum(0)

    def run(x, w, b):
        return Odd.apply(x @ w.t(), b)

    reasons = refusals(run, torch.randn(6, 4), w, b, trace=trace_joint)
    assert reasons == ["the backward reads mm, the matmul without its bias"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_refuses_integers_and_complex_numbers(dtype):
    a = torch.ones(4, 4).to(dtype)
    reasons = refusals(lambda a: torch.tanh(torch.mm(a, a)), a)
    assert reasons == [f"{dtype} is not a real floating-point dtype"]


def test_refuses_mixed_dtypes(x, w, b):
    def run(x, w, b):
        return F.relu(F.linear(x.to(BF16), w.to(BF16)) + b)

    assert refusals(run, x, w, b) == ["mixed dtypes: matmul torch.bfloat16, bias torch.float32"]


def test_refuses_a_scaled_addmm(b):
    a = torch.randn(6, 4)
    reasons = refusals(lambda b, a, c: F.relu(torch.addmm(b, a, c, beta=0.5)), b, a, torch.randn(4, 8))
    assert reasons == ["addmm with alpha or beta other than 1"]


def test_refuses_an_addend_that_is_no_bias():
    a, residual = torch.randn(6, 4), torch.randn(6, 8)
    reasons = refusals(lambda r, a, c: F.relu(torch.addmm(r, a, c)), residual, a, torch.randn(4, 8))
    assert reasons == ["addmm with an addend that is not a bias of shape [N]"]


def test_a_wider_cast_ends_the_match(x, w):
    # in float64 the activation was more accurate than the op, which computes in float32
    assert refusals(lambda x, w: F.gelu(F.linear(x, w).double()), x, w) == []


@pytest.mark.quick("<lambda>0-dtype1", "<lambda>1-dtype0", "<lambda>2-dtype1", "<lambda>3-dtype0", "<lambda>4-dtype1")
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    "fn",
    [
        lambda p, to: F.relu(to(p).float()),
        lambda p, to: F.gelu(to(p)).float(),
        lambda p, to: F.gelu(p, approximate="tanh").mul(to(p)),
        lambda p, to: to(F.silu(p)).float(),
        lambda p, to: to(F.silu(p)) * to(p),
    ],
)
def test_a_rounding_of_the_model_stays(fn, dtype, x, w):
    def run(x, w):
        return fn(F.linear(x, w), lambda t: t.to(dtype))

    found = torch.compile(run, backend="kp_tpu", options={"precision": "float32"})(x, w)
    torch.testing.assert_close(found, run(x, w), rtol=0, atol=1e-6)  # a rounding to bfloat16 is 4e-3, to float16 5e-4


def test_convolutions_and_batched_products_never_match():
    def run(image, kernel, a):
        return F.relu(F.conv2d(image, kernel)), F.relu(torch.bmm(a, a))

    assert refusals(run, torch.randn(1, 3, 8, 8), torch.randn(4, 3, 1, 1), torch.randn(2, 4, 4)) == []


# Values and gradients.


@pytest.mark.parametrize("trace", [trace_inference, trace_joint])
@pytest.mark.parametrize("key", ["gelu_new", "silu", "relu"])
def test_fake_values_are_true(trace, key, x, w, b, u):
    gm = trace(lambda x, w, b, u: ACT2FN[key](F.linear(x, w, b)) * F.linear(x, u), x, w, b, u)
    assert fuse(gm) == (1, ())

    class Checked(fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            fake = node.meta.get("val")
            if isinstance(fake, Tensor):
                assert (fake.shape, fake.dtype, fake.stride()) == (value.shape, value.dtype, value.stride()), node
                assert node.op == "placeholder" or "tensor_meta" in node.meta, node
            return value

    inputs = [torch.randn(n.meta["val"].shape) for n in gm.graph.nodes if n.op == "placeholder"]
    Checked(gm).run(*inputs)


def test_new_nodes_carry_the_metadata_of_the_product(x, w, b):
    gm = trace_joint(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b)
    product = next(node for node in gm.graph.nodes if node.target == torch.ops.aten.addmm.default)
    product.meta["nn_module_stack"] = {"": ("layers.0.up", torch.nn.Linear)}
    before = set(gm.graph.nodes)
    assert fuse(gm) == (1, ())
    new = [node for node in gm.graph.nodes if node not in before]
    assert len(new) == 4
    assert all(node.meta["nn_module_stack"] == product.meta["nn_module_stack"] for node in new)


def test_symbolic_sizes_get_no_new_guard(w, b):
    def run(x, w, b):
        return F.silu(F.linear(x, w, b)) * F.linear(x, w)

    x = torch.randn(2, 3, 4)
    gm = make_fx(run, tracing_mode="symbolic")(x, w.detach(), b.detach())
    guards = gm.shape_env.guards.copy()
    assert fuse(gm) == (1, ())
    assert gm.shape_env.guards == guards
    torch.testing.assert_close(gm(x, w, b), run(x, w, b), rtol=1e-6, atol=1e-6)


def through_aot(
    run: Callable[..., Tensor], partition: Callable[..., tuple], with_pass: bool = True
) -> Callable[..., Tensor]:
    def partition_fused(joint, inputs, **kwargs):
        assert not with_pass or fuse(joint) == (1, ())
        return partition(joint, inputs, **kwargs)

    return aot_function(run, fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=partition_fused)


def gradients(run: Callable[..., Tensor], args: tuple[Tensor, ...]) -> list[Tensor]:
    """The result of `run` and the gradients of `args`."""
    result = run(*args)
    weights = torch.linspace(-1, 1, result.numel(), dtype=F32).reshape(result.shape)
    return [t.detach() for t in (result, *torch.autograd.grad((result * weights).sum(), args))]


def mlp(key: str) -> Callable[..., Tensor]:
    return lambda x, w, b, w2: F.linear(ACT2FN[key](F.linear(x, w, b)), w2)


@pytest.mark.quick(
    "relu-default_partition", "gelu-min_cut_rematerialization_partition", "gelu_new-default_partition",
    "silu-min_cut_rematerialization_partition", "tanh-default_partition", "sigmoid-min_cut_rematerialization_partition",
    "gelu_10-default_partition", "relu2-min_cut_rematerialization_partition",
)  # fmt: skip
@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@pytest.mark.parametrize("key", HUGGING_FACE)
def test_gradients_through_a_joint_graph(partition, key, x, w, b):
    args = (x, w, b, torch.randn(4, 8, requires_grad=True))
    expected = gradients(mlp(key), args)
    for result, reference in zip(gradients(through_aot(mlp(key), partition), args), expected, strict=True):
        # sums of 24 float32 products in another order: a few units of the largest term
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)


@pytest.mark.quick(
    "silu-min_cut_rematerialization_partition", "gelu-default_partition", "relu-min_cut_rematerialization_partition",
)  # fmt: skip
@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@pytest.mark.parametrize("activation", [F.silu, F.gelu, torch.relu, torch.sigmoid])
def test_gradients_of_a_gated_unit(partition, activation, x, w, u):
    def run(x, w, u, w2):
        return F.linear(activation(F.linear(x, w)) * F.linear(x, u), w2)

    args = (x, w, u, torch.randn(4, 8, requires_grad=True))
    expected = gradients(run, args)
    for result, reference in zip(gradients(through_aot(run, partition), args), expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)


def large(dtype: torch.dtype = BF16) -> tuple[Tensor, ...]:
    """x, w, b, second weight; pre-activations of about unit variance."""
    shapes = ((128, 64), (256, 64), (256,), (256, 64))
    scales = (1, 64**-0.5, 0.25, 64**-0.5)
    return tuple((torch.randn(s) * c).to(dtype).requires_grad_() for s, c in zip(shapes, scales, strict=True))


# The ratio is the root of (variance of the fused form / variance of the chain). In units of r^2, with c = 1.2 of
# tests/ops/test_linear_act.py: a rounding before the activation counts c^2 = 1.44, one behind it 1.
# Spelled out GELU: 1 / (1.44 + 0.5 x, 1 + tanh and their product, less where 1 + tanh is near 1 or 2) -> 0.55.
# A gate that is exact: 1 / (1.44 + activation + product) -> 0.54.
# A gate that is a rounded product itself: (gate + 1) / (1.44 + activation + gate + product) -> 0.67.
@pytest.mark.parametrize(
    ("run", "derived"),
    [
        (lambda x, w, b, u: ACT2FN["gelu_new"](F.linear(x, w, b)), 0.55),
        (lambda x, w, b, u: F.silu(F.linear(x, w)) * x.repeat(1, 4), 0.54),
        (lambda x, w, b, u: F.gelu(F.linear(x, w, b)) * F.linear(x, u), 0.67),
    ],
)
def test_error_in_bfloat16(run, derived):
    args = large()
    gm = trace_inference(run, *args)
    assert fuse(gm) == (1, ())
    with torch.no_grad():
        reference = run(*(a.double() for a in args))
        assert relative_error(gm(*args)[0], reference) <= 1.1 * derived * relative_error(run(*args), reference)


@pytest.mark.quick("gelu", "silu")
@pytest.mark.parametrize("key", ["gelu", "gelu_new", "silu"])
def test_gradients_in_bfloat16_are_no_worse_than_without_the_pass(key):
    x, w, b, w2 = large()
    args = (x, w, b, w2.t().detach().requires_grad_())
    reference = gradients(mlp(key), tuple(a.detach().double().requires_grad_() for a in args))

    def error(with_pass: bool) -> float:
        found = gradients(through_aot(mlp(key), min_cut_rematerialization_partition, with_pass), args)
        return relative_error(*(torch.cat([t.flatten() for t in ts]) for ts in (found, reference)))

    assert error(True) <= error(False)


@pytest.mark.parametrize(("key", "num_wide"), [("gelu", 2), ("gelu_new", 2), ("silu", 2), ("relu", 1)])
def test_no_more_is_saved_for_the_backward(key, num_wide, x, w, b):
    saved = []

    def forward(gm, _):
        results = next(node for node in gm.graph.nodes if node.op == "output").args[0]
        saved.extend(n.meta["val"].numel() for n in results[1:] if isinstance(n, fx.Node))
        return make_boxed_func(gm)

    def partition(joint, inputs, **kwargs):
        assert fuse(joint) == (1, ())
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    aot_function(mlp(key), fw_compiler=forward, partition_fn=partition)(x, w, b, torch.randn(4, 8, requires_grad=True))
    # [B, S, N] = 48 numbers each: the pre-activation and the second Linear's input; ReLU has the second do for both
    assert saved.count(48) == num_wide
