"""FoldCasts: what it fires on, what it leaves, that dtypes stay, and what it says about the program's precision."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.graph.nodes import calls
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fold_casts import FoldCasts
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.pipeline import build_pipeline, required_precision
from tests.graphs import applied, graph_text, trace_inference, trace_joint

aten = torch.ops.aten
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
U = 2**-8


def tensors(*sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def cast(gm: fx.GraphModule, *before: object, scope: str = "matmul") -> fx.GraphModule:
    for graph_pass in (*before, CastBf16(scope)):
        graph_pass(gm)
    return gm


def folded(gm: fx.GraphModule) -> PassReport:
    return applied(FoldCasts(), gm)


def test_arguments_are_read_as_they_are():
    x, weight, bias = tensors((8, 6), (4, 6), (4,))
    gm = cast(trace_inference(lambda x, w, b: F.linear(x, w, b).tanh(), x, weight, bias))
    assert folded(gm).rewritten == 1
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[8, 6] = input
arg1_1: f32[4, 6] = input
arg2_1: f32[4] = input
t_default_1: f32[6, 4] = aten.t.default(arg1_1)
addmm_default: f32[8, 4] = aten.addmm.default(arg2_1, arg0_1, t_default_1)
_to_copy_default_4: bf16[8, 4] = aten._to_copy.default(addmm_default, dtype=torch.bfloat16)
_to_copy_default_3: f32[8, 4] = aten._to_copy.default(_to_copy_default_4, dtype=torch.float32)
tanh: f32[8, 4] = aten.tanh.default(_to_copy_default_3)
return (tanh,)""",
    )


def test_the_second_product_reads_the_activation_as_it_is_and_the_backward_keeps_its_casts():
    gm = cast(trace_joint(lambda x, v, w: F.gelu(x @ v) @ w, *tensors((8, 6), (6, 4), (4, 2))), FuseLinearActivation())
    assert folded(gm).rewritten == 2
    assert_expected_inline(
        graph_text(gm),
        """\
primals_1: f32[8, 6] = input
primals_2: f32[6, 4] = input
primals_3: f32[4, 2] = input
tangents_1: f32[8, 2] = input
_to_copy_default: bf16[8, 6] = aten._to_copy.default(primals_1, dtype=torch.bfloat16)
_to_copy_default_1: bf16[6, 4] = aten._to_copy.default(primals_2, dtype=torch.bfloat16)
linear_act_train_default_1 = kp.linear_act_train.default(primals_1, primals_2, None, gelu, out_dtype=torch.float32)
getitem_2: f32[8, 4] = <built-in function getitem>(linear_act_train_default_1, 0)
getitem_3: f32[8, 4] = <built-in function getitem>(linear_act_train_default_1, 1)
_to_copy_default_15: bf16[8, 4] = aten._to_copy.default(getitem_3, dtype=torch.bfloat16)
_to_copy_default_2: f32[8, 4] = aten._to_copy.default(_to_copy_default_15, dtype=torch.float32)
_to_copy_default_3: bf16[8, 4] = aten._to_copy.default(getitem_2, dtype=torch.bfloat16)
_to_copy_default_5: bf16[4, 2] = aten._to_copy.default(primals_3, dtype=torch.bfloat16)
mm_default: f32[8, 2] = aten.mm.default(getitem_2, primals_3)
t_default: bf16[4, 8] = aten.t.default(_to_copy_default_3)
_to_copy_default_7: f32[4, 8] = aten._to_copy.default(t_default, dtype=torch.float32)
_to_copy_default_8: bf16[8, 2] = aten._to_copy.default(tangents_1, dtype=torch.bfloat16)
_to_copy_default_9: f32[8, 2] = aten._to_copy.default(_to_copy_default_8, dtype=torch.float32)
mm_2: f32[4, 2] = aten.mm.default(_to_copy_default_7, _to_copy_default_9)
t_default_1: bf16[2, 4] = aten.t.default(_to_copy_default_5)
mm_3: bf16[8, 4] = aten.mm.default(_to_copy_default_8, t_default_1)
_to_copy_default_10: f32[8, 4] = aten._to_copy.default(mm_3, dtype=torch.float32)
gelu_backward: f32[8, 4] = aten.gelu_backward.default(_to_copy_default_10, _to_copy_default_2)
t_default_2: bf16[6, 8] = aten.t.default(_to_copy_default)
_to_copy_default_11: f32[6, 8] = aten._to_copy.default(t_default_2, dtype=torch.float32)
_to_copy_default_12: bf16[8, 4] = aten._to_copy.default(gelu_backward, dtype=torch.bfloat16)
_to_copy_default_13: f32[8, 4] = aten._to_copy.default(_to_copy_default_12, dtype=torch.float32)
mm_4: f32[6, 4] = aten.mm.default(_to_copy_default_11, _to_copy_default_13)
t_default_3: bf16[4, 6] = aten.t.default(_to_copy_default_1)
_to_copy_default_14: f32[4, 6] = aten._to_copy.default(t_default_3, dtype=torch.float32)
mm_5: f32[8, 6] = aten.mm.default(_to_copy_default_13, _to_copy_default_14)
return [mm_default, mm_5, mm_4, mm_2]""",
    )


MODELS = {
    "mm": (lambda x, w: (x @ w.t()).tanh(), tensors((8, 6), (4, 6))),
    "addmm": (lambda x, w, b: F.linear(x, w, b).tanh(), tensors((8, 6), (4, 6), (4,))),
    "linear_act": (lambda x, w, b: F.gelu(F.linear(x, w, b)), tensors((8, 6), (4, 6), (4,))),
    "gated": (lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v), tensors((8, 6), (4, 6), (4, 6))),
    "contract": (lambda x, w, b: F.linear(x, w, b).tanh(), tensors((2, 8, 6), (4, 6), (4,))),
}


@pytest.mark.quick("mm-linear", "addmm-all", "linear_act-matmul", "gated-all", "contract-linear")
@pytest.mark.parametrize("scope", ["linear", "matmul", "all"])
@pytest.mark.parametrize("model", MODELS)
def test_results_keep_their_dtypes_and_their_values_within_rounding(model, scope):
    fn, args = MODELS[model]
    gm = cast(trace_joint(fn, *args), FuseLinearActivation(), scope=scope)
    FoldViews(float32_in_one_pass=True)(gm)
    inputs, tangent = [t.detach() for t in args], torch.ones(fn(*args).shape)
    before = torch.utils._pytree.tree_leaves(gm(inputs, [tangent]))
    report = folded(gm)
    assert report.rewritten > 0
    after = torch.utils._pytree.tree_leaves(gm(inputs, [tangent]))
    assert [t.dtype for t in after] == [t.dtype for t in before]
    # An element is a sum of at most 8 products of roundings to bfloat16, of numbers around 1, three deep.
    torch.testing.assert_close(after, before, rtol=0, atol=64 * U)


def test_a_second_run_changes_nothing():
    fn, args = MODELS["linear_act"]
    gm = cast(trace_joint(fn, *args), FuseLinearActivation())
    folded(gm)
    text = graph_text(gm)
    assert folded(gm).rewritten == 0
    assert graph_text(gm) == text


def test_the_program_needs_no_more_than_one_pass():
    fn, args = MODELS["addmm"]
    gm = cast(trace_inference(fn, *args))
    folded(gm)
    assert required_precision(gm.graph, "highest") == "default"


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "highest"), (torch.bfloat16, "default")])
def test_the_state_of_a_recurrent_layer_is_not_rounded(dtype, precision):
    """Its matmul is inside the operator. In one pass a TPU would round the float32 state."""

    def run(x, h, c, *weights):
        return torch.ops.kp.lstm(x, [h, c], weights, True, 1, 0.0, False, False, False)

    shapes = ((5, 2, 3), (1, 2, 4), (1, 2, 4), (16, 3), (16, 4), (16,), (16,))
    gm = trace_inference(run, *(torch.randn(shape).to(dtype) for shape in shapes))
    assert required_precision(cast(gm).graph, "highest") == precision


@pytest.mark.parametrize(
    ("fn", "keep"),
    [
        (lambda x, w: (x @ w.t()).tanh() @ x, ("aten.mm",)),  # none is cast
        (lambda x, w: torch.linalg.vector_norm(torch.cdist(x, w)) + (x @ w.t()), ()),  # a product of float32 beside it
    ],
)
def test_a_graph_with_float32_products_stays(fn, keep):
    gm = trace_inference(fn, *tensors((4, 6), (4, 6)))
    CastBf16("matmul", keep)(gm)
    text = graph_text(gm)
    assert folded(gm).rewritten == 0
    assert graph_text(gm) == text


def pointwise(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """[2, 4, 3, 3]: a convolution of 1 x 1 between others."""
    return F.conv2d(F.conv2d(F.conv2d(x, w, padding=1).tanh(), v).tanh(), w, padding=1)


@pytest.mark.parametrize("trace", [trace_inference, trace_joint])
def test_a_convolution_of_one_by_one_reads_no_casts(trace):
    inputs = tensors((2, 4, 3, 3), (4, 4, 3, 3), (4, 4, 1, 1))
    gm = cast(trace(pointwise, *inputs))
    assert folded(gm).rewritten == (2 if trace is trace_joint else 1)
    weights = [n.args[1 if n.target is aten.convolution.default else 2] for n in calls(gm.graph, *CONVOLUTIONS)]
    assert len(weights) == (6 if trace is trace_joint else 3)
    assert [w.op == "placeholder" for w in weights] == [w.meta["val"].shape[-1] == 1 for w in weights]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x.exp() @ w.t(),  # one argument alone
        lambda x, w: F.conv1d(x[None], w[:, None].expand(4, 4, 6)[:, :, :3]),
        lambda x, w: x.bfloat16() @ w.t().bfloat16(),
        lambda x, w: x.bfloat16().float() @ w.t().bfloat16().float(),
    ],
    ids=["one operand", "a convolution", "the user's casts", "the user's rounding"],
)
def test_other_casts_stay(fn):
    gm = trace_inference(fn, *tensors((4, 6), (4, 6)))
    cast(gm)
    assert folded(gm).rewritten == 0


@pytest.mark.parametrize("x", [torch.randn(8, 12)[:, :6], torch.randn(1, 6).expand(8, 6)], ids=["gaps", "repeats"])
def test_views_that_a_cast_has_made_possible(x):
    w = torch.randn(12, 4)
    gm = cast(trace_inference(lambda x, w: (x.reshape(4, 12) @ w).tanh(), x, w))
    before = gm(x, w)
    folded(gm)
    torch.testing.assert_close(gm(x, w), before, rtol=0, atol=64 * U)


def test_it_is_there_where_there_are_casts():
    assert FoldCasts() in build_pipeline(CompileOptions(level="conservative"))
    assert FoldCasts() not in build_pipeline(CompileOptions(precision="float32"))
