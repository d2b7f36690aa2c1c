"""FoldViews: what it fires on, what it leaves, and that values, gradients and strides stay."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.pipeline import build_pipeline
from tests.graphs import applied, graph_text, trace_inference, trace_joint

F64 = torch.float64


def tensors(*sizes: tuple[int, ...], dtype: torch.dtype = F64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, dtype=dtype, generator=generator).requires_grad_() for size in sizes]


def folded(gm: fx.GraphModule) -> PassReport:
    return applied(FoldViews(float32_in_one_pass=True), gm)


def heads(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias).unflatten(-1, (2, -1)).transpose(1, 2)


def test_heads_are_written_where_they_are_read():
    args = [t.detach() for t in tensors((2, 128, 6), (8, 6), (8,), (4, 4, 3), dtype=torch.float32)]
    gm = trace_inference(lambda x, w, b, y: heads(x, w, b).exp().flatten(0, 1) @ y, *args)
    assert folded(gm).rewritten == 1
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[2, 128, 6] = input
arg1_1: f32[8, 6] = input
arg2_1: f32[8] = input
arg3_1: f32[4, 4, 3] = input
reshape_default: f32[1, 8, 1] = aten.reshape.default(arg2_1, [1, 8, 1])
contract_default: f32[2, 8, 128] = kp.contract.default(arg0_1, arg1_1, reshape_default, abc,dc->adb)
reshape_default_1: f32[2, 2, 4, 128] = aten.reshape.default(contract_default, [2, 2, 4, 128])
transpose_int: f32[2, 2, 128, 4] = aten.transpose.int(reshape_default_1, -2, -1)
exp: f32[2, 2, 128, 4] = aten.exp.default(transpose_int)
clone: f32[2, 2, 128, 4] = aten.clone.default(exp, memory_format=torch.contiguous_format)
_unsafe_view: f32[4, 128, 4] = aten._unsafe_view.default(clone, [4, 128, 4])
expand: f32[4, 128, 4] = aten.expand.default(_unsafe_view, [4, 128, 4])
view_3: f32[4, 128, 4] = aten.view.default(expand, [4, 128, 4])
expand_1: f32[4, 4, 3] = aten.expand.default(arg3_1, [4, 4, 3])
view_4: f32[4, 4, 3] = aten.view.default(expand_1, [4, 4, 3])
bmm: f32[4, 128, 3] = aten.bmm.default(view_3, view_4)
view_5: f32[4, 128, 3] = aten.view.default(bmm, [4, 128, 3])
return (view_5,)""",
    )


def test_heads_have_their_weight_first_where_a_chip_wants_it():
    args = [t.detach() for t in tensors((2, 128, 6), (8, 6), (8,), (4, 4, 3), (3, 6))]

    def both(x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return heads(x, weight, bias).exp().flatten(0, 1) @ y, F.linear(x, other).exp()

    gm = trace_inference(both, *args)
    applied(FoldViews(weight_first=True, float32_in_one_pass=True), gm)
    equations = [node.args[3] for node in gm.graph.nodes if node.target is torch.ops.kp.contract.default]
    assert equations == ["dc,abc->adb", "abc,dc->abd"]
    torch.testing.assert_close(gm(*args), both(*args))


@pytest.mark.parametrize(("target", "is_first"), [("auto", False), ("v5e", False), ("v5p", True), ("v4", True)])
def test_the_target_decides_whose_heads_have_their_weight_first(target: str, is_first: bool):
    assert FoldViews(weight_first=is_first) in build_pipeline(CompileOptions.from_dict({"target": target}))


def attend(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    q = heads(x, weight).sin()
    return F.linear((q * q.cos()).transpose(1, 2).reshape(x.shape[0], x.shape[1], -1), out) + x


CASES: dict[str, tuple[Callable, list[Tensor]]] = {
    "linear": (F.linear, tensors((2, 3, 6), (8, 6), (8,))),
    "linear without bias": (F.linear, tensors((2, 3, 6), (8, 6))),
    "heads": (lambda *a: heads(*a).tanh(), tensors((2, 5, 6), (8, 6), (8,))),
    "narrow heads": (lambda *a: heads(*a).tanh(), tensors((2, 128, 6), (8, 6), (8,))),
    "out of heads": (attend, tensors((2, 128, 8), (8, 8), (8, 8))),
    "one row": (lambda *a: heads(*a).tanh(), tensors((1, 1, 6), (8, 6), (8,))),
    "a view that suits no longer": (
        lambda *a: heads(*a).exp().transpose(1, 2).flatten(2).cos(), tensors((2, 128, 6), (8, 6)),
    ),
    "four dimensions": (F.linear, tensors((2, 3, 4, 6), (8, 6), (8,))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_stay(case):
    fn, args = CASES[case]
    gm = trace_joint(fn, *args)
    inputs = [t.detach() for t in args]
    tangent = torch.randn(fn(*inputs).shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    before = gm(inputs, [tangent])
    assert folded(gm).rewritten > 0
    # sums of at most 256 products in another order
    torch.testing.assert_close(gm(inputs, [tangent]), before, rtol=1e-12, atol=1e-12)


def test_a_second_run_changes_nothing():
    gm = trace_joint(attend, *CASES["out of heads"][1])
    folded(gm)
    text = graph_text(gm)
    assert folded(gm).rewritten == 0
    assert graph_text(gm) == text


def test_widened_operands_are_read_as_they_were():
    x, weight = tensors((2, 128, 8), (8, 8), dtype=torch.float32)
    gm = trace_joint(lambda x, w: F.linear(x.sin(), w) + x, x, weight)
    CastBf16("matmul")(gm)
    folded(gm)
    made = [n for n in gm.graph.nodes if n.target is torch.ops.kp.contract.default]
    assert [n.args[0].meta["val"].dtype for n in made] == [torch.bfloat16] * len(made)
    assert made[0].meta["val"].dtype == torch.float32


@pytest.mark.parametrize(
    "fn",
    [
        heads,  # strides of heads that a caller sees
        lambda x, w: heads(x, w).exp(),  # which others take over
        lambda x, w: x[0] @ w.t(),  # a matrix
        lambda x, w: (x.reshape(-1, 6) @ w.t()).view(32, 64).cos().t().sum(0),
    ],
)
def test_strides_of_results_stay(fn):
    args = [t.detach() for t in tensors((2, 128, 6), (8, 6))]
    gm = trace_inference(fn, *args)
    strides = [n.meta["val"].stride() for n in gm.graph.output_node().args[0]]
    before = gm(*args)
    folded(gm)
    assert [n.meta["val"].stride() for n in gm.graph.output_node().args[0]] == strides
    assert [t.stride() for t in gm(*args)] == strides
    torch.testing.assert_close(gm(*args), before, rtol=1e-12, atol=1e-12)


def test_a_product_with_an_incoming_gradient_is_folded():
    gm = trace_joint(F.linear, *tensors((2, 3, 6), (8, 6)))
    assert folded(gm).rewritten == 2
    left = [n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert len(left) == 1  # of the weight's gradient, which sums over B and S


def test_the_cast_of_an_incoming_gradient_is_kept_apart():
    gm = trace_joint(F.linear, *tensors((2, 3, 6), (8, 6), dtype=torch.float32))
    CastBf16("matmul")(gm)
    folded(gm)
    of_tangent = graph_text(gm).split("tangents_1, ")[1].replace(", out_dtype=torch.float32", "")
    assert_expected_inline(
        of_tangent,
        """\
dtype=torch.bfloat16)
wait_for_all_default = kp.wait_for_all.default([_to_copy_default_4])
getitem: bf16[2, 3, 8] = <built-in function getitem>(wait_for_all_default, 0)
view_default_1: bf16[6, 8] = aten.view.default(getitem, [6, 8])
t_default_1: bf16[8, 6] = aten.t.default(view_default_1)
_to_copy_default_5: f32[8, 6] = aten._to_copy.default(t_default_1, dtype=torch.float32)
mm_1: f32[8, 6] = aten.mm.default(_to_copy_default_5, _to_copy_default_1)
t_2: f32[6, 8] = aten.t.default(mm_1)
contract_default_1: f32[2, 3, 6] = kp.contract.default(getitem, _to_copy_default_2, None, abc,cd->abd)
t_4: f32[8, 6] = aten.t.default(t_2)
return [contract_default, contract_default_1, t_4]""",
    )


def test_float32_in_several_passes_is_left_alone():
    """torch_xla's einsum would take one pass."""
    gm = trace_inference(F.linear, *(t.detach() for t in tensors((2, 3, 6), (8, 6), dtype=torch.float32)))
    assert applied(FoldViews(), gm).rewritten == 0
    assert folded(gm).rewritten == 1


@pytest.mark.parametrize(
    ("options", "is_folded"),
    [({}, False), ({"matmul_precision": "default"}, True), ({"matmul_precision": "high"}, False)],
    ids=str,
)
def test_the_matmul_precision_decides_about_float32(options: dict[str, str], is_folded: bool):
    pipeline = build_pipeline(CompileOptions.from_dict(options))
    assert FoldViews(float32_in_one_pass=is_folded) in pipeline


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32], ids=str)
def test_integers_and_complex_numbers_are_left_alone(dtype):
    x, w = torch.ones(2, 3, 4).to(dtype), torch.ones(4, 5).to(dtype)
    assert not folded(trace_inference(torch.matmul, x, w)).rewritten


def test_one_number_for_all_columns_is_left_alone():
    x, weight, bias = (t.detach() for t in tensors((2, 3, 6), (8, 6), (1,)))
    gm = trace_inference(F.linear, x, weight, bias)
    assert not folded(gm).rewritten


def test_symbolic_sizes_are_left_alone():
    seen = []

    def keep(gm: fx.GraphModule, _: list) -> fx.GraphModule:
        seen.append(folded(gm).rewritten)
        return gm

    from torch._dynamo.backends.common import aot_autograd

    x, weight = (t.detach() for t in tensors((2, 3, 6), (8, 6)))
    torch._dynamo.mark_dynamic(x, 1)
    torch.compile(F.linear, backend=aot_autograd(fw_compiler=keep))(x, weight)
    assert seen == [0]


def test_work_grows_with_the_graph_and_not_with_its_square(monkeypatch):
    def in_turn(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = x + heads(x, weight).exp().transpose(1, 2).flatten(2)
        return x.tanh()

    def num_reads(num_blocks: int) -> int:
        read, inputs = [], fx.Node.all_input_nodes.fget
        args = tensors((2, 128, 6), *[(6, 6)] * num_blocks, dtype=torch.float32)
        gm = trace_inference(in_turn, *(t.detach() for t in args))
        with monkeypatch.context() as patch:
            patch.setattr(fx.Node, "all_input_nodes", property(lambda node: read.append(node) or inputs(node)))
            assert FoldViews(float32_in_one_pass=True)(gm).rewritten == num_blocks
        return len(read)

    assert num_reads(16) <= 2.2 * num_reads(8)
