"""CastBf16: what is cast and in which form, what stays in float32 and why, and what it does to values.

Errors are measured against float64. u = 2^-8 is the unit roundoff of bfloat16 (8 significant bits).
B, S: batch, sequence; H heads of size D; K, N of a Linear: x [B, S, K], w [N, K], b [N].
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from functorch.compile import (
    aot_function,
    aot_module_simplified,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
)
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.graph.editing import run_on_fakes
from kp_dynamo.graph.module_paths import module_paths
from kp_dynamo.graph.nodes import calls, fake_of
from kp_dynamo.hardware import Spread
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.passes.precision.cast_nodes import is_upcast
from kp_dynamo.passes.precision.keep_float32 import unknown_op_names
from kp_dynamo.passes.precision.sensitive_ops import SENSITIVE, may_follow
from kp_dynamo.pipeline import build_pipeline
from tests.graphs import applied, graph_text, trace_inference, trace_joint

aten, kp = torch.ops.aten, torch.ops.kp
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
SCOPES = ("linear", "matmul", "all")
U = 2**-8


def cast(gm: fx.GraphModule, scope: str = "matmul", keep: tuple[str, ...] = ()) -> fx.GraphModule:
    """The graph after the pass, which must leave it well formed, its values true, and nothing to a second run."""
    report = CastBf16(scope, keep)(gm)
    gm.graph.lint()
    gm.recompile()
    text = graph_text(gm)
    again = CastBf16(scope, keep)(gm)
    assert (again.rewritten, again.refused, graph_text(gm)) == (0, report.refused, text)
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and node.all_input_nodes and isinstance(value, Tensor):
            true = run_on_fakes(node)
            assert (true.dtype, true.shape, true.stride()) == (value.dtype, value.shape, value.stride()), node
    return gm


def refusals(gm: fx.GraphModule, scope: str = "matmul", keep: tuple[str, ...] = ()) -> list[str]:
    """Reasons of a run that must change nothing."""
    before = graph_text(gm)
    report = CastBf16(scope, keep)(gm)
    assert (report.rewritten, graph_text(gm)) == (0, before)
    return [reason for _, reason in report.refused]


def dtypes(gm: fx.GraphModule, target: Callable) -> list[torch.dtype]:
    """Dtypes of the results of an op, in graph order."""
    values = (node.meta["val"] for node in gm.graph.nodes if node.target is target)
    return [value.dtype if isinstance(value, Tensor) else value[0].dtype for value in values]


def casts(gm: fx.GraphModule) -> Counter[tuple[str, torch.dtype]]:
    """How often each value is cast to each dtype."""
    nodes = [node for node in gm.graph.nodes if node.target is aten._to_copy.default]
    return Counter((node.args[0].name, node.meta["val"].dtype) for node in nodes)


def num_casts(gm: fx.GraphModule, dtype: torch.dtype) -> int:
    return sum(count for (_, to), count in casts(gm).items() if to == dtype)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


# --- what it does to a graph


def test_a_linear_between_two_activations():
    gm = trace_inference(lambda x, w, b: F.gelu(F.linear(F.relu(x), w, b)), torch.randn(6, 4), leaf(8, 4), leaf(8))
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[6, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8] = input
relu: f32[6, 4] = aten.relu.default(arg0_1)
t: f32[4, 8] = aten.t.default(arg1_1)
addmm: f32[6, 8] = aten.addmm.default(arg2_1, relu, t)
gelu: f32[6, 8] = aten.gelu.default(addmm)
return (gelu,)""",
    )
    assert_expected_inline(
        graph_text(cast(gm)),
        """\
arg0_1: f32[6, 4] = input
arg1_1: f32[8, 4] = input
arg2_1: f32[8] = input
relu: f32[6, 4] = aten.relu.default(arg0_1)
_to_copy_default: bf16[6, 4] = aten._to_copy.default(relu, dtype=torch.bfloat16)
_to_copy_default_1: bf16[8, 4] = aten._to_copy.default(arg1_1, dtype=torch.bfloat16)
t_default: bf16[4, 8] = aten.t.default(_to_copy_default_1)
_to_copy_default_2: bf16[8] = aten._to_copy.default(arg2_1, dtype=torch.bfloat16)
addmm: bf16[6, 8] = aten.addmm.default(_to_copy_default_2, _to_copy_default, t_default)
_to_copy_default_3: f32[6, 8] = aten._to_copy.default(addmm, dtype=torch.float32)
gelu: f32[6, 8] = aten.gelu.default(_to_copy_default_3)
return (gelu,)""",
    )


def test_a_residual_takes_the_float32_result_of_rounded_operands():
    gm = cast(trace_inference(lambda x, w: F.relu(x + x @ w), torch.randn(6, 4), leaf(4, 4)))
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[6, 4] = input
arg1_1: f32[4, 4] = input
_to_copy_default: bf16[6, 4] = aten._to_copy.default(arg0_1, dtype=torch.bfloat16)
_to_copy_default_1: f32[6, 4] = aten._to_copy.default(_to_copy_default, dtype=torch.float32)
_to_copy_default_2: bf16[4, 4] = aten._to_copy.default(arg1_1, dtype=torch.bfloat16)
_to_copy_default_3: f32[4, 4] = aten._to_copy.default(_to_copy_default_2, dtype=torch.float32)
mm: f32[6, 4] = aten.mm.default(_to_copy_default_1, _to_copy_default_3)
add: f32[6, 4] = aten.add.Tensor(arg0_1, mm)
relu: f32[6, 4] = aten.relu.default(add)
return (relu,)""",
    )


@pytest.mark.parametrize(
    "between",
    [
        lambda y: y.view(2, 3, 4).permute(1, 0, 2).reshape(6, 4),
        lambda y: torch.cat([part.transpose(0, 1) for part in y.split(2, 1)]).t()[:, :6].t()[:, :4].reshape(-1, 4),
        lambda y: y.unbind(0)[0].unsqueeze(0).expand(3, 4),
        lambda y: y[1:3],
    ],
)
def test_views_and_parts_stay_in_bfloat16_between_products(between):
    gm = cast(trace_inference(lambda x, w: F.relu(between(x @ w) @ w), torch.randn(6, 4), torch.randn(4, 4)))
    assert dtypes(gm, aten.mm.default) == [BF16, BF16]
    assert num_casts(gm, BF16) == 2  # x and w
    assert num_casts(gm, F32) == 1  # for relu


@pytest.mark.parametrize("scope", SCOPES)
def test_a_value_is_cast_once_for_all_of_its_products_and_views(scope):
    def fn(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, q)) * torch.tanh(F.linear(x, k))

    gm = cast(trace_joint(fn, leaf(2, 3, 4), leaf(8, 4), leaf(8, 4)), scope)
    assert max(casts(gm).values()) == 1
    # x, q, k and the gradients of the two tanh: forward and backward read the same three
    assert num_casts(gm, BF16) == 5


def test_a_users_casts_are_merged_and_cancelled():
    def fn(x: Tensor, w: Tensor) -> Tensor:
        narrow = x.to(BF16)
        wide = narrow.to(F32).view(4, 6)
        return torch.cat([narrow.view(4, 6).float().tanh(), x.to(BF16).to(F32).view(4, 6).cos(), wide.to(BF16) * w])

    gm = cast(trace_inference(fn, torch.randn(6, 4), torch.randn(4, 6)))
    assert num_casts(gm, BF16) == 1
    x, w = torch.randn(6, 4), torch.randn(4, 6)
    assert torch.equal(gm(x, w)[0], fn(x, w))


def test_a_cast_that_is_returned_stays_so_that_no_result_aliases_an_input():
    gm = trace_inference(lambda x: (x.float().bfloat16(), x.float(), x.float()), torch.randn(4, dtype=BF16))
    assert refusals(gm) == []


def test_a_rounding_is_no_pair():
    gm = trace_inference(lambda x: F.relu(x.bfloat16().float()), torch.randn(4))
    assert refusals(gm) == []


def test_parameters_results_and_gradients_keep_their_dtype():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2))
    for scope in SCOPES:
        gm = cast(joint_of(model, torch.randn(2, 3, 4, 4)), scope)
        assert {n.meta["val"].dtype for n in gm.graph.nodes if n.op == "placeholder"} == {F32}
        results = gm.graph.output_node().all_input_nodes
        assert {n.meta["val"].dtype for n in results} == {F32}
        assert BF16 in dtypes(gm, aten.addmm.default)


def test_gradients_that_devices_sum_in_bfloat16_are_rounded():
    def fn(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.linear(x, v).relu(), w)

    gm = trace_joint(fn, leaf(6, 4), leaf(8, 4), leaf(8, 8))
    reports = [CastBf16("matmul", (), (1, 2))(gm) for _ in range(2)]
    assert [report.rewritten for report in reports] == [6, 0]
    _, *gradients = gm.graph.output_node().all_input_nodes
    assert [(fake_of(n).dtype, fake_of(matmul_behind(n)).dtype) for n in gradients] == [(F32, F32), *[(F32, BF16)] * 2]


def matmul_behind(node: fx.Node) -> fx.Node:
    """The matmul that a result is a view or a cast of."""
    return node if node.target is aten.mm.default else matmul_behind(*node.all_input_nodes)


@pytest.mark.quick("linear-default_partition", "matmul-min_cut_rematerialization_partition", "all-default_partition")
@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_cast_joint_graph_partitions_and_trains(partition, scope):
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w)), v).tanh()

    def partition_cast(joint: fx.GraphModule, inputs: object, **options: object) -> tuple:
        return partition(cast(joint, scope), inputs, **options)

    arguments = [leaf(2, 3, 4), leaf(8, 4), leaf(4, 8)]
    compiled = aot_function(fn, fw_compiler=lambda gm, _: make_boxed_func(gm), partition_fn=partition_cast)
    compiled(*arguments).sum().backward()
    exact = [a.detach().double().requires_grad_() for a in arguments]
    fn(*exact).sum().backward()
    for argument, wanted in zip(arguments, exact, strict=True):
        assert argument.grad.dtype == F32
        # At most ten roundings of u each on the way to a gradient, were they all to add up.
        assert relative_error([argument.grad], [wanted.grad]) < 10 * U


def test_what_is_not_float32_is_left_alone():
    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> tuple[Tensor, ...]:
        return a @ a, b @ b, c @ c, d @ d, e @ e, (wide := e.float()) @ wide

    tensors = [torch.ones(2, 2, dtype=dtype) for dtype in (F64, torch.complex64, torch.int64, torch.float16, BF16)]
    assert refusals(trace_inference(fn, *tensors), "all") == []


def test_symbolic_shapes():
    def fn(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.relu(F.linear(x, w)), v).tanh()

    arguments = torch.randn(5, 3, 4), torch.randn(8, 4), torch.randn(2, 8)
    for scope in SCOPES:
        gm = cast(make_fx(fn, tracing_mode="symbolic")(*arguments), scope)
        other = torch.randn(7, 2, 4), *arguments[1:]
        assert relative_error([gm(*other)], [fn(*(a.double() for a in other))]) < 6 * U


def test_an_input_with_gaps_is_cast_behind_its_views():
    x = torch.randn(6, 8)[:, ::2]
    gm = cast(trace_inference(lambda x, w: (x.t() @ w).relu(), x, torch.randn(6, 3)))
    assert relative_error(gm(x, w := torch.randn(6, 3)), [F.relu(x.double().t() @ w.double())]) < 3 * U


# --- scopes


def test_linear_takes_linears_and_their_gradients_only():
    def fn(x: Tensor, w: Tensor, v: Tensor, b: Tensor) -> Tensor:
        hidden = torch.addmm(b, F.linear(x, w).tanh(), v)  # as Conv1D of GPT-2
        return torch.bmm(hidden[None], hidden[None].transpose(1, 2)).tanh()

    gm = trace_joint(fn, leaf(6, 4), leaf(5, 4), leaf(5, 3), leaf(3))
    assert CastBf16("linear")(gm).rewritten == 6
    assert dtypes(gm, aten.bmm.default) == [F32] * 3
    other = trace_joint(lambda x, y: torch.mm(x, y).tanh(), leaf(2, 3), leaf(3, 2))
    assert refusals(other, "linear") == []


def test_matmul_takes_the_whole_family():
    def fn(x: Tensor, y: Tensor, b: Tensor, image: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
        products = x @ y, torch.addmm(b, x, y), torch.bmm(x[None], y[None]), F.conv2d(image, kernel)
        return tuple(p.tanh() for p in products)

    shapes = (4, 4), (4, 4), (4,), (1, 2, 5, 5), (4, 2, 3, 3)
    gm = cast(trace_joint(fn, *(leaf(*shape) for shape in shapes)))
    family = (aten.mm, aten.addmm, aten.bmm, aten.convolution, aten.convolution_backward)
    assert {op: set(dtypes(gm, op.default)) for op in family} == {
        **{op: {BF16} for op in family}, aten.mm: {BF16, F32},  # some gradients are returned as they are
    }  # fmt: skip
    convolution = next(n for n in gm.graph.nodes if n.target is aten.convolution.default)
    assert [operand.meta["val"].dtype for operand in convolution.all_input_nodes] == [BF16] * 2


@pytest.mark.parametrize(
    ("fn", "is_cast"),
    [
        (lambda y, x: F.relu(y), True),
        (lambda y, x: F.silu(y) * y, True),
        (lambda y, x: F.gelu(y) * 0.5, True),
        (lambda y, x: y * (y > 0), True),
        (lambda y, x: torch.where(y > 0, y, -y), True),
        (lambda y, x: y[torch.arange(2)] - y[:2], True),
        (lambda y, x: y.masked_fill(y > 0, -torch.inf), True),
        (lambda y, x: y + x, False),  # a residual
        (lambda y, x: torch.sigmoid(x) * y, False),  # sigmoid is not of a product
        (lambda y, x: y * 1.702, False),  # bfloat16 has 1.703125
        (lambda y, x: y * torch.full((), 2.0), False),
        (lambda y, x: y.masked_fill(y > 0, torch.finfo(F32).min), False),  # -inf in bfloat16
        (lambda y, x: torch.where(y > 0, y, torch.finfo(F32).min), False),
        (lambda y, x: y * torch.arange(4), False),
        (lambda y, x: torch.exp(y), False),
        (lambda y, x: y.rsqrt(), False),
        (lambda y, x: y.pow(2), False),
        (lambda y, x: y.sum(0), False),
        (lambda y, x: y.cumsum(0), False),
        (lambda y, x: F.layer_norm(y, (4,)), False),
        (lambda y, x: F.log_softmax(y, -1), False),
        (lambda y, x: F.mse_loss(y, y.flip(0)), False),
        (lambda y, x: y > y.flip(0), False),
    ],
)
def test_all_follows_a_product_through_what_is_off_the_sensitive_list(fn, is_cast):
    def model(x: Tensor, w: Tensor) -> Tensor:
        return torch.atan(fn(torch.mm(x, w), x))

    gm = cast(trace_inference(model, torch.randn(4, 4), torch.randn(4, 4)), "all")
    read = next(n for n in gm.graph.nodes if n.target is aten.atan.default).args[0]
    assert (read.target is aten._to_copy.default) == is_cast
    assert dtypes(gm, aten.mm.default) in ([BF16], [F32])


def test_all_follows_into_the_backward_but_not_into_results():
    gm = cast(trace_joint(lambda x, w: F.relu(F.relu(x @ w) @ w) * 2, leaf(4, 4), leaf(4, 4)), "all")
    assert dtypes(gm, aten.relu.default) == [BF16, BF16]
    assert dtypes(gm, aten.threshold_backward.default) == [F32, BF16]  # the first is of the incoming gradient
    assert dtypes(gm, aten.mul.Tensor)[0] == F32


def test_positions_stay_float32_at_all():
    def fn(x: Tensor, w: Tensor, frequencies: Tensor) -> Tensor:
        angles = torch.arange(300)[:, None].float() * frequencies
        queries = x @ w
        return (queries * angles.cos() + queries.neg() * angles.sin()).tanh()

    gm = cast(trace_inference(fn, torch.randn(300, 4), torch.randn(4, 4), torch.randn(4)), "all")
    assert dtypes(gm, aten.cos.default) == dtypes(gm, aten.sin.default) == [F32]
    assert dtypes(gm, aten.neg.default) == [BF16]


def test_every_op_of_the_sensitive_table_is_one_and_stays():
    for names in SENSITIVE.values():
        for name in names:
            packet = getattr(aten, name)
            assert not any(may_follow(getattr(packet, overload)) for overload in packet.overloads())


# --- what is refused, and why


@pytest.mark.parametrize(
    "positions",
    [
        lambda f: torch.arange(9)[None, None, :].float(),
        lambda f: torch.arange(9, dtype=F32).div(4)[None, None],
        lambda f: torch.stack([torch.arange(9)]).to(F32).mul(0.5).expand(1, 1, 9),
    ],
)
def test_positions_are_refused(positions):
    gm = trace_inference(lambda f: torch.bmm(f, positions(f)).tanh(), torch.randn(1, 4, 1))
    (reason,) = refusals(gm)
    assert reason.endswith("is computed from integers (positions?), which bfloat16 represents only up to 256")


def test_an_angle_is_refused():
    gm = trace_inference(lambda x, w: torch.cat([(x @ w * 6.28).sin(), x], -1), torch.randn(4, 4), torch.randn(4, 4))
    assert refusals(gm) == ["sin reads it as an angle, modulo a period"]


def test_a_mask_of_booleans_is_no_position():
    gm = trace_inference(lambda x, m: (m.float() @ x).tanh(), torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool))
    assert dtypes(cast(gm), aten.mm.default) == [BF16]


@pytest.mark.parametrize(
    "name", ["aten.mm", "mm", "aten::mm", "aten::mm.default", "aten.mm.default", "linear", "aten.matmul"]
)
def test_an_op_is_kept_by_any_of_its_names(name):
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (F.linear(x, w).tanh()[None] @ w[None]).tanh()

    gm = trace_inference(fn, torch.randn(4, 4), torch.randn(4, 4))
    report = CastBf16("matmul", (name,))(gm)
    assert report.refused[0] == ("mm", f"kept in float32 by {name!r}")
    assert dtypes(gm, aten.mm.default) == [F32]
    assert dtypes(gm, aten.bmm.default) == ([F32] if name == "aten.matmul" else [BF16])


def test_a_convolution_is_kept_with_its_backward_and_a_follower_by_its_name():
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.conv1d(x, w)).tanh()

    arguments = leaf(1, 2, 5), leaf(4, 2, 3)
    assert refusals(trace_joint(fn, *arguments), "all", ("conv1d",)) == ["kept in float32 by 'conv1d'"] * 2
    report = CastBf16("all", ("relu",))(trace_joint(fn, *arguments))
    assert report.refused == (("relu", "kept in float32 by 'relu'"),)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def joint_of(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """The joint graph as the backend meets it: through Dynamo, which knows modules, and AOTAutograd."""
    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, joint_inputs: object, **options: object) -> tuple:
        found.append(joint)
        return default_partition(joint, joint_inputs, **options)

    def backend(gm: fx.GraphModule, arguments: list[Tensor]) -> Callable:
        return aot_module_simplified(gm, arguments, fw_compiler=lambda gm, _: gm.forward, partition_fn=partition)

    torch.compile(model, backend=backend)(*inputs)
    return found[0]


@pytest.mark.parametrize(
    ("glob", "num_kept"),
    [("layers.0.up", 2), ("layers.0", 5), ("layers.*.up", 5), ("*", 11), ("layers.?.down", 6), ("nothing", 0)],
)
def test_a_module_is_kept_forward_and_backward(glob, num_kept):
    gm = joint_of(Model(), torch.randn(3, 4))
    report = CastBf16("matmul", (glob,))(gm)
    assert [reason for _, reason in report.refused] == [f"kept in float32 by {glob!r}"] * num_kept
    assert report.rewritten == 11 - num_kept  # 4 forward, 4 gradients of weights, 3 of inputs


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ("L['self']", [""]),
        ("L['self'].layers", ["layers"]),
        ("L['self']._modules['layers']._modules['0'].up", ["layers.0.up"]),
        ("L['self'].layers[0].up", ["layers.0.up"]),
        ("L['self']._orig_mod.layers", ["layers"]),
        ("L['net'].layers", ["layers", "net.layers"]),
        ("G['net']._modules['layers']", ["layers", "net.layers"]),
        ("layers.0", ["layers.0"]),
    ],
)
def test_paths_of_modules(source, paths):
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"": (source, nn.Module)}
    assert list(module_paths(node)) == paths


def test_unknown_op_names_are_told():
    good = ("aten.mm", "mm", "aten::mm.default", "kp::linear_act", "model.layers.*", "lm_head", "aten.linear")
    bad = ("aten.mn", "aten::mm.defualt", "kp.linear", "nowhere::mm", "aten.name")
    assert unknown_op_names(good + bad) == bad


# --- values


def relative_error(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Norm of the difference over norm, over all tensors together."""
    got_all, wanted_all = (torch.cat([t.detach().double().flatten() for t in part]) for part in (got, wanted))
    return float((got_all - wanted_all).norm() / wanted_all.norm())


def test_the_error_of_one_product_is_within_its_bound():
    x, w = torch.randn(64, 256), torch.randn(256, 64)
    narrow, wide = cast(trace_inference(lambda x, w: ((x @ w).relu(), (w.t() @ x.t())), x, w))(x, w)
    exact, sizes = x.double() @ w.double(), x.double().abs() @ w.double().abs()
    float32 = 256 * 2**-24 * sizes  # accumulation
    operands = (2 * U + U**2) * sizes + float32
    assert ((wide.t().double() - exact).abs() <= operands).all()
    assert ((narrow.double() - exact.relu()).abs() <= operands + U * exact.abs() * (1 + U)).all()


def attention(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    q, k, u = (F.linear(x, w).view(2, 16, 4, 24).transpose(1, 2)).split(8, -1)
    return x + F.linear(F.scaled_dot_product_attention(q, k, u, is_causal=True).transpose(1, 2).reshape(2, 16, 32), v)


def mlp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x + F.linear(F.silu(F.linear(x, w[:64])) * F.linear(x, w[:64]), v.repeat(1, 2))


def convolutions(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    kernel = w.reshape(32, 32, 3)
    return F.conv1d(F.relu(F.conv1d(x.transpose(1, 2), kernel)), kernel)


def logits(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.log_softmax(F.linear(F.layer_norm(x, (32,)), w), -1)


@pytest.mark.quick("attention-all", "attention-linear", "mlp-all", "convolutions-matmul", "logits-linear")
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("fn", [attention, mlp, convolutions, logits])
def test_the_error_is_no_larger_than_autocasts(fn, scope):
    arguments = [leaf(2, 16, 32), leaf(96, 32), leaf(32, 32)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gm = cast(trace_joint(fn, *arguments), scope)
    exact = [a.detach().double().requires_grad_() for a in arguments]
    wanted = fn(*exact)
    tangent = torch.randn_like(wanted)
    wanted.backward(tangent)
    reference = [wanted, *(e.grad for e in exact if e.grad is not None)]
    with torch.autocast("cpu", BF16):
        got = fn(*arguments)
    got.backward(tangent.to(got.dtype))
    autocast = [got, *(a.grad for a in arguments if a.grad is not None)]
    compiled = [r for r in pytree.tree_leaves(gm(arguments, [tangent.float()])) if r is not None]
    for part in (slice(0, 1), slice(1, None)):
        assert relative_error(compiled[part], reference[part]) <= 1.1 * relative_error(autocast[part], reference[part])


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(F32).min])
def test_a_row_that_a_mask_hides_is_as_in_float32(least, scope):
    def fn(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        addend = torch.zeros(mask.shape).masked_fill(mask, least)
        k = k.transpose(1, 2)
        scores = torch.baddbmm(addend[None], q, k) + torch.bmm(q, k).masked_fill(mask, least)
        return torch.softmax(scores.clamp(min=torch.finfo(F32).min), -1)

    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    mask[0] = True  # sees nothing
    arguments = torch.randn(2, 4, 8), torch.randn(2, 4, 8), mask
    got, wanted = cast(trace_inference(fn, *arguments), scope)(*arguments)[0], fn(*arguments)
    assert torch.equal(got[:, 0], wanted[:, 0])
    assert relative_error([got], [wanted]) < 16 * U  # scores up to about 8 (of norm 8 vectors), two roundings each


def test_a_score_keeps_its_float32():
    gm = cast(trace_inference(lambda q, k: torch.softmax(torch.bmm(q, k) / 8 - 1, -1), leaf(1, 4, 4), leaf(1, 4, 4)))
    assert dtypes(gm, aten.bmm.default) == [F32]
    assert casts(gm)[("arg0_1", BF16)] == 1


# --- the fused Linear


def test_a_fused_linear_keeps_its_bias_and_its_result():
    def fn(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> Tensor:
        return F.silu(F.linear(x, w, b)) * F.linear(x, v)

    arguments = leaf(6, 4), leaf(8, 4), leaf(8), leaf(8, 4)
    gm = trace_inference(fn, *arguments)
    assert FuseLinearActivation()(gm).rewritten == 1
    cast(gm, "linear")
    op = next(n for n in gm.graph.nodes if n.target is kp.linear_act.default)
    x, w, b = (n.meta["val"].dtype for n in op.args[:3])
    assert (x, w, b, op.kwargs["multiplier"].meta["val"].dtype) == (BF16, BF16, F32, BF16)
    assert op.meta["val"].dtype == F32
    assert relative_error(gm(*arguments), [fn(*(a.double() for a in arguments))]) < 4 * U


def test_a_fused_linear_in_training_saves_its_preactivation_in_bfloat16():
    gm = trace_joint(lambda x, w: F.gelu(F.linear(x, w)), leaf(6, 4), leaf(8, 4))
    assert FuseLinearActivation()(gm).rewritten == 1
    cast(gm, "linear")
    op = next(n for n in gm.graph.nodes if n.target is kp.linear_act_train.default)
    assert [value.dtype for value in op.meta["val"]] == [F32, BF16]
    assert dtypes(gm, aten.mm.default) == [F32, F32]  # gradients, which the graph returns
    assert num_casts(gm, BF16) == 3


@pytest.mark.parametrize("name", ["aten.mm", "linear", "kp::linear_act"])
def test_a_fused_linear_is_kept_by_what_it_was_made_of(name):
    gm = trace_inference(lambda x, w: F.gelu(F.linear(x, w)), leaf(6, 4), leaf(8, 4))
    FuseLinearActivation()(gm)
    assert refusals(gm, "matmul", (name,)) == [f"kept in float32 by {name!r}"]


def test_repr_is_its_identity():
    text = "CastBf16(scope='all', keep_float32=('aten.mm',), reduced=(), rounds_sums=False)"
    assert repr(CastBf16("all", ("aten.mm",))) == text


@pytest.mark.parametrize(("rounds", "dtype"), [(False, torch.float32), (True, BF16)])
def test_results_that_devices_sum_are_rounded_before_they_are_added(rounds, dtype):
    gm = trace_inference(lambda x, w: x + F.linear(x, w), leaf(6, 8), leaf(8, 8))
    applied(CastBf16(rounds_sums=rounds), gm)
    [matmul] = calls(gm.graph, torch.ops.aten.mm.default)
    assert matmul.meta["val"].dtype == dtype


@pytest.mark.parametrize(("spread", "rounds"), [(Spread(8, 8), False), (Spread(8, 2, 4), True), (Spread(), False)])
def test_matmuls_are_summed_by_devices_on_a_mesh_that_divides_them(spread, rounds):
    for dtype in ("bfloat16", None):
        pipeline = build_pipeline(CompileOptions(reduce_dtype=dtype).over(spread))
        [casts] = [graph_pass for graph_pass in pipeline if isinstance(graph_pass, CastBf16)]
        assert casts.rounds_sums == (rounds and dtype is not None)


def test_a_scaled_broadcast_is_not_seen_through():
    """The gradient of a mean is a broadcast, divided: a view of the quotient is none of the broadcast."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head((x + self.inner(x)).mean(1))

    model, x = Model(), torch.randn(2, 5, 8)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for level in ("conservative", "balanced", "aggressive"):
        result = torch.compile(model, backend="kp_tpu", options={"level": level})(x)
        found = torch.autograd.grad(result.square().sum(), list(model.parameters()))
        difference = torch.cat([(f - e).flatten() for f, e in zip(found, expected, strict=True)])
        # Three products in a row, forward and back, of operands rounded to 2**-9.
        assert difference.norm() < 0.02 * torch.cat([e.flatten() for e in expected]).norm()


def test_a_convolution_with_a_bias_keeps_its_result():
    """XLA adds the bias to the rounded result and rounds again."""
    gm = trace_inference(F.conv1d, torch.randn(1, 2, 8), torch.randn(4, 2, 3), torch.randn(4))
    CastBf16("matmul")(gm)
    convolution = next(n for n in gm.graph.nodes if n.target is aten.convolution.default)
    dtypes = [operand.meta["val"].dtype for operand in convolution.all_input_nodes]
    assert (dtypes, convolution.meta["val"].dtype) == ([torch.float32] * 3, torch.float32)
    assert sum(is_upcast(n) for n in gm.graph.nodes) == 2


@pytest.mark.parametrize(("trace", "dtype"), [(trace_inference, torch.float32), (trace_joint, torch.bfloat16)])
def test_a_convolution_keeps_its_result_where_nothing_is_saved(trace, dtype):
    gm = trace(lambda x, w: F.conv1d(x, w).tanh(), leaf(1, 2, 8), leaf(4, 2, 3))
    CastBf16("matmul")(gm)
    convolution = next(n for n in gm.graph.nodes if n.target is aten.convolution.default)
    assert convolution.meta["val"].dtype == dtype
