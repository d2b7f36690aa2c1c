"""RecomputeActivations: what is saved in its place, what is left, and that gradients stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from kp_dynamo.graph.nodes import backward_nodes, calls
from kp_dynamo.ops.linear_act import ACTIVATIONS
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fold_views import FoldViews
from kp_dynamo.passes.fuse_linear_activation import FuseLinearActivation
from kp_dynamo.passes.recompute_activations import RecomputeActivations
from tests.graphs import applied, graph_text, trace_inference, trace_joint
from tests.spine import check_gradients_like_eager

ROWS, WIDTH, HIDDEN = 6, 4, 8
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid,
}  # fmt: skip
TRAIN = torch.ops.kp.linear_act_train.default


def arguments(*shape: int) -> list[Tensor]:
    """x of this shape before its last dimension, weights up, gate and down."""
    generator = torch.Generator().manual_seed(0)
    sizes = (*shape, WIDTH), (HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def two_layers(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, up, gate, down: F.linear(act(F.linear(x, up)), down)


def gated(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def fused(fn: Callable[..., Tensor], *shape: int, casts: bool = True) -> fx.GraphModule:
    gm = trace_joint(fn, *arguments(*(shape or (ROWS,))))
    for graph_pass in (
        FuseLinearActivation(),
        *([CastBf16("matmul")] if casts else []),
        FoldViews(float32_in_one_pass=True),
    ):
        graph_pass(gm)
    gm.recompile()
    return gm


def recomputed(gm: fx.GraphModule) -> int:
    return applied(RecomputeActivations(), gm).rewritten


def saved(gm: fx.GraphModule) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """What crosses from forward to backward, by dtype and shape; inputs aside."""
    forward, _ = min_cut_rematerialization_partition(gm, [], num_fwd_outputs=1)
    values = [n.meta["val"] for n in forward.graph.output_node().args[0][1:] if n.op != "placeholder"]
    return [(v.dtype, tuple(v.shape)) for v in values]


def test_the_backward_reads_a_value_of_its_own():
    gm = fused(two_layers(F.gelu))
    before = {n.name for n in gm.graph.nodes}
    assert recomputed(gm) == 1
    new = {n.name for n in gm.graph.nodes} - before
    lines = graph_text(gm).splitlines()
    backward = backward_nodes(gm.graph)
    readers = {user.name for node in gm.graph.nodes if node.name in new for user in node.users if user in backward}
    assert_expected_inline(
        "\n".join(line for line in lines if line.split(":")[0] in new | readers),
        """\
_to_copy_default_15: f32[6, 8] = aten._to_copy.default(getitem_1, dtype=torch.float32)
gelu_default: f32[6, 8] = aten.gelu.default(_to_copy_default_15)
_to_copy_default_16: bf16[6, 8] = aten._to_copy.default(gelu_default, dtype=torch.bfloat16)
_to_copy_default_17: f32[6, 8] = aten._to_copy.default(_to_copy_default_16, dtype=torch.float32)
mm_2: f32[4, 8] = aten.mm.default(_to_copy_default_8, _to_copy_default_17)""",
    )
    assert all(n.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for n in gm.graph.nodes if n.name in new)


@pytest.mark.parametrize("shape", [(ROWS,), (2, 3)], ids=["rows", "[B, S]"])
def test_only_the_preactivation_is_saved(shape):
    without, with_pass = fused(two_layers(F.gelu), *shape), fused(two_layers(F.gelu), *shape)
    assert recomputed(with_pass) == 1
    size = ROWS * HIDDEN
    assert [sum(torch.Size(s).numel() == size for _, s in saved(gm)) for gm in (without, with_pass)] == [2, 1]


def test_gated_results_are_left_alone():
    assert recomputed(fused(gated)) == 0


@pytest.mark.quick("relu-float32", "gelu-bfloat16", "gelu_tanh-float32", "silu-float32", "tanh-bfloat16")
@pytest.mark.parametrize("casts", [True, False], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gradients_stay(act, casts):
    fn = two_layers(ACTS[act])
    gm, again = fused(fn, 2, 3, casts=casts), fused(fn, 2, 3, casts=casts)
    num_saved = sum(1 for _ in calls(gm.graph, TRAIN))  # relu, tanh and sigmoid need their result
    assert recomputed(again) == num_saved
    inputs = [t.detach() for t in arguments(2, 3)]
    tangent = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    (out,), gradients = gm(inputs, [tangent])
    (out_again,), gradients_again = again(inputs, [tangent])
    assert torch.equal(out, out_again)
    # One rounding more to bfloat16 (unit roundoff 2^-8), of one operand of one product.
    tolerance = {"rtol": 2**-7, "atol": 2**-7 * ROWS} if casts else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(gradients_again, gradients, **tolerance)


def test_a_result_that_the_graph_returns_is_left_alone():
    def also_hidden(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(F.linear(x, up))
        return F.linear(hidden, down), hidden

    assert recomputed(fused(also_hidden)) == 0


def test_what_has_a_tag_is_left_alone():
    gm = fused(two_layers(F.gelu))
    next(calls(gm.graph, TRAIN)).meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert recomputed(gm) == 0


def test_a_second_run_changes_nothing():
    gm = fused(two_layers(F.gelu), 2, 3)
    assert recomputed(gm) == 1
    text = graph_text(gm)
    assert recomputed(gm) == 0
    assert graph_text(gm) == text


def test_an_inference_graph_is_left_alone():
    gm = trace_inference(two_layers(F.gelu), *[t.detach() for t in arguments(ROWS)])
    FuseLinearActivation()(gm)
    assert recomputed(gm) == 0


@pytest.mark.quick("blocks", "0.5")
@pytest.mark.parametrize("mode", ["off", "attention", "blocks", 0.5])
def test_gradients_agree_with_eager_in_every_checkpoint_mode(mode):
    model = two_layers(F.gelu)
    check_gradients_like_eager(lambda *args: model(*args) + gated(*args), *arguments(2, 3), checkpoint=mode)


def test_the_users_own_checkpoints_are_left_alone():
    def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return checkpoint(lambda *a: F.linear(F.gelu(F.linear(*a[:2])), a[2]), x, up, down, use_reentrant=False).tanh()

    x, up, _, down = arguments(2, 3)
    check_gradients_like_eager(fn, x, up, down)
