"""FlashAttention: what it fires on, what it refuses and why.

B, H, S, T, D are the sizes of a batch, its heads, queries, keys and the width of a head; all are 1 x 2 x 128 x 128 x 64
where nothing else is said.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import kp_dynamo
from kp_dynamo.autograd.decompositions.table import decompositions
from kp_dynamo.graph.editing import check_values
from kp_dynamo.passes.flash_attention import FlashAttention
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.rewrite_attention import RewriteAttention
from tests.graphs import graph_text, trace_inference, trace_joint

kp = torch.ops.kp
BF16 = torch.bfloat16


def qkv(s: int = 128, t: int = 128, d: int = 64, e: int | None = None, dtype: torch.dtype = BF16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, s, d), (1, 2, t, d), (1, 2, t, e or d))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def sdpa(**options: object) -> Callable:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def traced(trace: Callable, fn: Callable, *args: Tensor) -> fx.GraphModule:
    """The graph as the pass sees it, of attentions that are `kp::attention` already."""
    with sdpa_kernel(SDPBackend.MATH):
        gm = trace(fn, *args, decompositions=decompositions())
    FoldConstants()(gm)
    assert RewriteAttention()(gm).rewritten == 1
    return gm


def flash_lines(gm: fx.GraphModule) -> str:
    return "\n".join(line for line in graph_text(gm).splitlines() if "kp.flash" in line or "kp.attention" in line)


def test_inference():
    gm = traced(trace_inference, sdpa(is_causal=True), *qkv(s=384))
    report = FlashAttention()(gm)
    assert (report.name, report.rewritten, report.refused) == ("flash_attention", 1, ())
    gm.graph.lint()
    check_values(gm.graph)
    assert_expected_inline(
        flash_lines(gm),
        """flash_attention_default: f32[2, 384, 64] = kp.flash_attention.default(view_default, view_default_1, view_4, 0.125, True, 128)""",  # noqa: E501
    )


def test_training_changes_both():
    gm = traced(trace_joint, sdpa(), *qkv(s=1024, t=1536))
    assert FlashAttention()(gm).rewritten == 1
    gm.graph.lint()
    check_values(gm.graph)
    assert_expected_inline(
        flash_lines(gm),
        """\
flash_attention_train_default = kp.flash_attention_train.default(view_default, view_default_1, view_4, 0.125, False, 512)
flash_attention_backward_default = kp.flash_attention_backward.default(view_6, view_default, view_default_1, view_4, getitem, getitem_1, 0.125, False, 512, 0.35355339059327373, 0.35355339059327373)""",  # noqa: E501
    )


@pytest.mark.parametrize("trace", [trace_inference, trace_joint])
def test_a_second_run_changes_nothing(trace):
    gm = traced(trace, sdpa(), *qkv())
    FlashAttention()(gm)
    text = graph_text(gm)
    assert FlashAttention()(gm).rewritten == 0
    assert graph_text(gm) == text


def test_the_block_divides_queries_and_keys():
    gm = traced(trace_inference, sdpa(), *qkv(s=1024, t=768))
    FlashAttention(block=512)(gm)
    (node,) = (n for n in gm.graph.nodes if n.target is kp.flash_attention.default)
    assert node.args[5] == 256


@pytest.mark.parametrize("block", [0, 64, 200, -128])
def test_a_block_that_no_kernel_has(block):
    with pytest.raises(ValueError, match=f"block={block} is invalid. Allowed: multiples of 128"):
        FlashAttention(block)


KEYS = torch.arange(128) < 100
REFUSED = {
    "mask": (sdpa(), [*qkv(), KEYS], "1 mask(s) among its operands. Allowed: no mask, or causal attention"),
    "queries": (sdpa(), qkv(s=130), "130 queries and 128 keys. Allowed: multiples of 128"),
    "keys": (sdpa(is_causal=True), qkv(t=64), "128 queries and 64 keys. Allowed: multiples of 128"),
    "values": (sdpa(), qkv(e=32), "queries of width 64 and values of width 32. Allowed: equal widths"),
    "wide": (sdpa(), qkv(d=192), "a head of width 192. Allowed: up to 128, and 256"),
    "wider": (sdpa(), qkv(d=512), "a head of width 512. Allowed: up to 128, and 256"),
    "double": (sdpa(), qkv(dtype=torch.float64), "operands of torch.float64. Allowed: bfloat16, float32"),
}


@pytest.mark.quick("trace_inference", "mask-trace_joint")
@pytest.mark.parametrize("trace", [trace_inference, trace_joint])
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernel_cannot_compute_stays(case, trace):
    fn, args, reason = REFUSED[case]
    gm = traced(trace, fn, *args)
    text = graph_text(gm)
    report = FlashAttention()(gm)
    assert (report.rewritten, [why for _, why in report.refused]) == (0, [reason])
    assert graph_text(gm) == text


@pytest.mark.parametrize(
    ("position", "value", "reason"), [(8, True, "rows that may have no key"), (6, 0.0, "a scale of 0")]
)
def test_what_no_traced_attention_has_is_refused_as_well(position, value, reason):
    gm = traced(trace_inference, sdpa(), *qkv())
    (node,) = (n for n in gm.graph.nodes if n.target is kp.attention.default)
    node.update_arg(position, value)
    assert [why for _, why in FlashAttention()(gm).refused] == [reason]


def test_sizes_that_are_symbols_are_refused():
    model = torch.compile(
        sdpa(), backend="kp_tpu", dynamic=True, options={"extra_passes": [FlashAttention()], "strict": True}
    )
    with pytest.raises(Exception, match="symbolic sizes"):
        model(*(t.detach() for t in qkv()))


def test_the_public_name():
    assert kp_dynamo.FlashAttention is FlashAttention
