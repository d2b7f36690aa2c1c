"""FoldConstants: what becomes part of the program, what stays an attribute, what is refused and why."""

import math

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from kp_dynamo.passes.fold_constants import FoldConstants
from tests.graphs import graph_text, trace_inference, trace_joint
from tests.spine import compiled

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)


def folded(gm: fx.GraphModule, **options: int) -> str:
    """The graph after the pass, which must keep it well formed and every fake value true, and be done in one run."""
    report = FoldConstants(**options)(gm)
    gm.graph.lint()
    gm.recompile()
    assert report.rewritten > 0
    text = graph_text(gm)
    again = FoldConstants(**options)(gm)
    assert (again.rewritten, graph_text(gm)) == (0, text)
    return text


def refusals(gm: fx.GraphModule, **options: int) -> list[str]:
    return [reason for _, reason in FoldConstants(**options)(gm).refused]


def test_a_scalar_becomes_a_number_in_forward_and_backward():
    gm = trace_joint(lambda x: x * torch.tensor(2.0), torch.randn(4, 3, requires_grad=True))
    assert_expected_inline(
        graph_text(gm),
        """\
primals_1: f32[4, 3] = input
tangents_1: f32[4, 3] = input
_tensor_constant0: f32[] = attribute _tensor_constant0
lift_fresh_copy: f32[] = aten.lift_fresh_copy.default(_tensor_constant0)
mul: f32[4, 3] = aten.mul.Tensor(primals_1, lift_fresh_copy)
mul_1: f32[4, 3] = aten.mul.Tensor(tangents_1, lift_fresh_copy)
return [mul, mul_1]""",
    )
    assert_expected_inline(
        folded(gm),
        """\
primals_1: f32[4, 3] = input
tangents_1: f32[4, 3] = input
mul_tensor: f32[4, 3] = aten.mul.Tensor(primals_1, 2.0)
mul_tensor_1: f32[4, 3] = aten.mul.Tensor(tangents_1, 2.0)
return [mul_tensor, mul_tensor_1]""",
    )


def test_a_uniform_tensor_becomes_full_and_a_counting_one_arange():
    def fn(x: Tensor) -> Tensor:
        return (x * torch.tensor([0.5, 0.5, 0.5]))[torch.tensor([6, 4, 2])]

    assert_expected_inline(
        folded(trace_inference(fn, torch.randn(8, 3))),
        """\
arg0_1: f32[8, 3] = input
full_default: f32[3] = aten.full.default([3], 0.5, dtype=torch.float32, device=cpu, pin_memory=False)
mul: f32[8, 3] = aten.mul.Tensor(arg0_1, full_default)
arange_start_step: i64[3] = aten.arange.start_step(6, 0, -2, dtype=torch.int64, device=cpu, pin_memory=False)
index: f32[3, 3] = aten.index.Tensor(mul, [arange_start_step])
return (index,)""",
    )


def test_any_other_stays_an_attribute_without_the_copy():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.0]), torch.randn(4, 3))
    assert_expected_inline(
        folded(gm),
        """\
arg0_1: f32[4, 3] = input
_tensor_constant0: f32[3] = attribute _tensor_constant0
add: f32[4, 3] = aten.add.Tensor(arg0_1, _tensor_constant0)
return (add,)""",
    )


def test_a_cast_of_a_small_constant_is_computed_now():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.5]).to(BF16), torch.randn(4, 3, dtype=BF16))
    assert_expected_inline(
        folded(gm),
        """\
arg0_1: bf16[4, 3] = input
_to_copy_constant: bf16[3] = attribute _to_copy_constant
add: bf16[4, 3] = aten.add.Tensor(arg0_1, _to_copy_constant)
return (add,)""",
    )


def test_a_cast_of_a_large_constant_stays_and_says_so():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.5]).to(BF16), torch.randn(3, dtype=BF16))
    assert refusals(gm, max_cast_elements=2) == ["a cast of 3 elements. Allowed: up to 2"]
    assert "_to_copy" in graph_text(gm)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x - torch.tensor(2.0),
        lambda x: torch.tensor(2.0) - x,
        lambda x: torch.tensor(2.0) + x,
        lambda x: torch.tensor(2.0) / x,
        lambda x: x / torch.tensor(3.0),
        lambda x: torch.where(torch.tensor(0.5) < x, 1.0, x),
        lambda x: torch.where(torch.tensor(0.5) >= x, 1.0, x),
        lambda x: torch.sub(torch.tensor(2.0), x, alpha=3),
        lambda x: torch.add(x, torch.tensor(2.0), alpha=3),
        lambda x: x.masked_fill(x > 0, torch.tensor(-math.inf)),
        lambda x: torch.where(x > 0, x, torch.tensor(-0.0)),
        lambda x: x * torch.tensor(math.nan),
        lambda x: x * torch.tensor(0.1, dtype=F64),
        lambda x: x.to(BF16) * torch.tensor(0.1),
        lambda x: x.to(BF16) * torch.tensor(0.1, dtype=BF16),
        lambda x: x.to(F16) + torch.tensor(1e30, dtype=F64),
        lambda x: x.to(torch.int32) * torch.tensor(2),
        lambda x: x.to(torch.int32) * torch.tensor(2.5),
        lambda x: x.to(torch.int8) + torch.tensor(300),
        lambda x: x.to(torch.int64) // torch.tensor(2),
        lambda x: x[0, 0] * torch.tensor(2.0, dtype=F64),
        lambda x: x[0, 0] < torch.tensor(0.1, dtype=F64),
        lambda x: (x > 0) + torch.tensor(True),
        lambda x: (x > 0) + torch.tensor(2),
        lambda x: x * torch.tensor(1 + 2j),
        lambda x: x + torch.tensor(5).to(F32) * torch.tensor(2.0),
        lambda x: x + torch.tensor([[7.0]]),
        lambda x: x + torch.tensor([0.0, -0.0, 0.0]),
        lambda x: x[torch.tensor([2, 0, 1])],
        lambda x: x[torch.tensor([1, 1])],
        lambda x: x + torch.tensor([3, 1], dtype=torch.int32)[0],
        lambda x: x[torch.tensor([], dtype=torch.int64)],
        lambda x: torch.full((), 2.0) * x * torch.scalar_tensor(3.0),
    ],
)
def test_results_are_bitwise_those_of_eager(fn):
    x = torch.randn(4, 3)
    gm = trace_inference(fn, x)
    folded(gm)
    (got,), wanted = gm(x), fn(x)
    assert got.dtype == wanted.dtype == gm.graph.output_node().args[0][0].meta["val"].dtype
    assert torch.equal(_bits(got), _bits(wanted))
    assert not any(node.target in LIFTS for node in gm.graph.nodes)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (lambda x: x * torch.tensor(0.1), BF16),  # 0.1 is another number in bfloat16
        (lambda x: x * torch.tensor(2.5), torch.int32),  # the constant decides the dtype
        (lambda x: x[0] + torch.tensor(2.0, dtype=F64), F32),  # 0-dim beside 0-dim: float64 wins
    ],
)
def test_a_number_that_would_mean_something_else_stays_a_tensor(fn, dtype):
    gm = trace_inference(fn, torch.ones(3, dtype=dtype))
    assert "aten.full.default([]," in folded(gm)


def test_a_constant_that_is_returned_is_refused():
    gm = trace_inference(lambda x: (x, torch.tensor([1.0, 2.0])[None]), torch.randn(3))
    before = graph_text(gm)
    assert refusals(gm) == ["a result of the graph, which the caller may change"]
    assert graph_text(gm) == before


def test_a_uniform_constant_that_is_returned_is_made_anew_at_each_call():
    gm = trace_inference(lambda x: (x + 1, torch.tensor([1.0, 1.0])), torch.randn(3))
    folded(gm)
    gm(torch.zeros(3))[1].add_(1)
    assert gm(torch.zeros(3))[1].tolist() == [1.0, 1.0]


def test_two_results_made_of_one_constant_stay_apart():
    gm = trace_inference(lambda x: (x + 1, torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])), torch.randn(3))
    first, second = (n for n in gm.graph.nodes if n.target in LIFTS)
    second.args = first.args
    folded(gm)
    _, changed, kept = gm(torch.zeros(3))
    changed.add_(1)
    assert kept.tolist() == [1.0, 1.0]


def test_a_constant_that_an_op_writes_to_is_refused():
    def fn(x: Tensor) -> Tensor:
        constant = torch.tensor([1.0, 2.0])
        return constant.add_(x)

    gm = make_fx(fn, tracing_mode="fake")(torch.randn(2))  # not functional
    assert refusals(gm) == ["add_ writes to it"]


def test_a_parameter_is_refused():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.0]), torch.randn(3))
    gm._tensor_constant0 = nn.Parameter(gm._tensor_constant0)
    assert refusals(gm) == ["a parameter, which its owner may change"]


def test_a_constant_that_cannot_be_read_is_refused():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.0]), torch.randn(3))
    gm._tensor_constant0 = gm._tensor_constant0.to_sparse()
    assert refusals(gm) == ["its value cannot be read: Tensor, torch.sparse_coo"]


def test_a_constant_on_another_device_is_refused():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.0]), torch.randn(3))
    gm._tensor_constant0 = gm._tensor_constant0.to("meta")
    assert refusals(gm) == ["on meta, not on the CPU"]


def test_a_cast_to_another_device_is_refused():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.5]).to(BF16), torch.randn(3, dtype=BF16))
    cast = next(n for n in gm.graph.nodes if n.target is torch.ops.aten._to_copy.default)
    cast.kwargs = {**cast.kwargs, "device": torch.device("meta")}
    assert refusals(gm) == ["moves the constant to meta"]


def test_identities_go_and_those_that_are_results_stay():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.alias(torch.ops.aten.alias(x)) + 1, torch.ops.aten.alias(torch.ops.aten.alias(x))

    assert_expected_inline(
        folded(make_fx(fn, tracing_mode="fake")(torch.randn(3))),
        """\
x_1: f32[3] = input
add: f32[3] = aten.add.Tensor(x_1, 1)
alias_3: f32[3] = aten.alias.default(x_1)
return (add, alias_3)""",
    )


def test_symbolic_shapes():
    def fn(x: Tensor) -> Tensor:
        return x * torch.tensor(2.0) + x.shape[0] * torch.tensor([1, 2, 4])

    gm = make_fx(fn, tracing_mode="symbolic")(torch.randn(5, 3))
    folded(gm)
    x = torch.randn(7, 3)
    assert torch.equal(gm(x), fn(x))


def test_under_a_fake_mode_values_are_real():
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2.0, 4.5]).to(F64), torch.randn(3))
    with next(n for n in gm.graph.nodes if n.op == "placeholder").meta["val"].fake_mode:
        folded(gm)
    assert torch.equal(gm(torch.ones(3))[0], torch.tensor([2.0, 3.0, 5.5], dtype=F64))


def test_repr_is_its_identity():
    assert repr(FoldConstants()) == "FoldConstants(max_cast_elements=4096)"


@pytest.mark.parametrize(
    "number", [lambda: torch.tensor(3.5), lambda: torch.full((), 3.5), lambda: torch.tensor([3.5])]
)
def test_a_function_of_a_number_is_that_of_a_tensor(number):
    """XLA's compiler has another logarithm than its programs."""
    x = torch.tensor([3.5])
    run = compiled(lambda x: torch.log(x) - torch.log(number()), precision="float32")
    assert run(x).tolist() == [0.0]
    places = compiled(lambda x: torch.ceil(torch.log(x) / torch.log(number())), precision="float32")
    assert places(torch.arange(1.0, 12.0)).tolist() == [0, 1, 1, *[2] * 8]


def test_a_program_computes_functions_of_numbers_and_no_arithmetic():
    def scaled(x):
        half = torch.full((), 7.0) / 2
        return x * half - torch.log(half)

    gm = trace_inference(scaled, torch.ones(2))
    assert_expected_inline(
        folded(gm),
        """\
arg0_1: f32[2] = input
mul_tensor: f32[2] = aten.mul.Tensor(arg0_1, 3.5)
full_default_input: f32[1] = attribute full_default_input
reshape_default: f32[] = aten.reshape.default(full_default_input, [])
log: f32[] = aten.log.default(reshape_default)
sub: f32[2] = aten.sub.Tensor(mul_tensor, log)
return (sub,)""",
    )
