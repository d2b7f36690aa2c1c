"""FuseLinearCrossEntropy: what it fires on, what it refuses and why, and what it does to losses and gradients."""

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn

from kp_dynamo.config.options import CompileOptions
from kp_dynamo.graph.nodes import calls
from kp_dynamo.passes.cast_bf16 import CastBf16
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from kp_dynamo.pipeline.build import build_pipeline
from tests.cross_entropies import BLOCK_BYTES, CLASSES, ROWS, WIDTH, fuse_small_heads, joint, operands, step
from tests.graphs import applied, graph_text, trace_inference

kp = torch.ops.kp
PASS = FuseLinearCrossEntropy(min_bytes=0, block_bytes=BLOCK_BYTES)
FUSED = (kp.linear_cross_entropy.default, kp.linear_cross_entropy_backward.default)


def plain(x, weight, bias, target):
    return F.cross_entropy(F.linear(x, weight), target)


def test_the_loss_of_a_graph_for_inference():
    gm = trace_inference(plain, *(t.detach() for t in operands()))
    assert applied(PASS, gm).rewritten == 1
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[6, 4] = input
arg1_1: f32[300, 4] = input
arg2_1: f32[300] = input
arg3_1: i64[6] = input
ne_scalar: b8[6] = aten.ne.Scalar(arg3_1, -100)
bitwise_not_default: b8[6] = aten.bitwise_not.default(ne_scalar)
masked_fill_scalar: i64[6] = aten.masked_fill.Scalar(arg3_1, bitwise_not_default, 0)
_to_copy_default: f32[6] = aten._to_copy.default(ne_scalar, dtype=torch.float32)
sum_default: f32[] = aten.sum.default(_to_copy_default)
linear_cross_entropy_default = kp.linear_cross_entropy.default(arg0_1, arg1_1, None, masked_fill_scalar, 1.0, 0.0, 128)
getitem_2: f32[6] = <built-in function getitem>(linear_cross_entropy_default, 0)
mul_tensor: f32[6] = aten.mul.Tensor(getitem_2, _to_copy_default)
bitwise_not_default_1: b8[6] = aten.bitwise_not.default(ne_scalar)
masked_fill_scalar_1: f32[6] = aten.masked_fill.Scalar(mul_tensor, bitwise_not_default_1, 0.0)
sum_default_1: f32[] = aten.sum.default(masked_fill_scalar_1)
div_tensor: f32[] = aten.div.Tensor(sum_default_1, sum_default)
return (div_tensor,)""",
    )


def test_the_gradients_of_a_joint_graph():
    gm = joint(plain, *operands())
    assert applied(PASS, gm).rewritten == 1
    assert [n.target for n in calls(gm.graph, *FUSED)] == list(FUSED)
    left = [torch.ops.aten._log_softmax.default, torch.ops.aten.nll_loss_backward.default, torch.ops.aten.mm.default]
    assert not list(calls(gm.graph, *left))


def shifted(x, weight, bias, target):
    """As transformers before 4.46 writes it: logits of all but the last position, labels of all but the first."""
    logits = F.linear(x.view(2, 3, WIDTH), weight)[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(2, 3)[:, 1:].reshape(-1))


def upcast(x, weight, bias, target):
    """As transformers 4.57 writes it: labels shifted, and logits in float32."""
    logits = F.linear(x.view(2, 3, WIDTH), weight).float()
    labels = F.pad(target.view(2, 3), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), ignore_index=-100)


def log_softmax_and_nll(x, weight, bias, target):
    return F.nll_loss(F.log_softmax(F.linear(x, weight, bias), dim=-1), target)


CASES = {
    "plain": plain,
    "shifted": shifted,
    "upcast": upcast,
    "log_softmax and nll_loss": log_softmax_and_nll,
    "a bias": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t),
    "a sum": lambda x, w, b, t: F.cross_entropy(F.linear(x, w), t, reduction="sum"),
    "no reduction": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b), t, reduction="none").square().sum(),
    "another ignored class": lambda x, w, b, t: F.cross_entropy(F.linear(x, w), t.clamp(0), ignore_index=50),
    "class weights": lambda x, w, b, t: F.cross_entropy(F.linear(x, w), t, weight=torch.arange(1.0, CLASSES + 1)),
    "class weights, no reduction": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w), t, weight=torch.arange(float(CLASSES)), reduction="none"
    ).sum(),
    "a weight that is not transposed": lambda x, w, b, t: F.cross_entropy(x @ (w * 2).t().contiguous(), t),
    "a soft cap": lambda x, w, b, t: F.cross_entropy(3 * torch.tanh(F.linear(x, w) / 3), t),
    "a factor and a soft cap": lambda x, w, b, t: F.cross_entropy((F.linear(x, w, b) * 0.5 / 2).tanh() * 2.5, t),
    "a factor": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b).float() / 8, t),
    "a negative factor": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b) * -0.5, t),
    "label smoothing": lambda x, w, b, t: F.cross_entropy(F.linear(x, w), t, label_smoothing=0.1),
    "label smoothing, a sum": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w, b) / 8, t, reduction="sum", label_smoothing=0.3
    ),
    "label smoothing, no reduction": lambda x, w, b, t: (
        F.cross_entropy(3 * torch.tanh(F.linear(x, w) / 3), t, reduction="none", label_smoothing=1.0).square().sum()
    ),
    "label smoothing, class weights": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w, b), t, weight=torch.arange(1.0, CLASSES + 1), label_smoothing=0.2
    ),
    "the sum of the log probabilities": lambda x, w, b, t: (
        F.nll_loss(log_p := F.log_softmax(F.linear(x, w), -1), t) - 0.01 * log_p.sum(-1).square().mean()
    ),
    "two heads": lambda x, w, b, t: plain(x, w, b, t) + 2 * F.cross_entropy(F.linear(x.tanh(), w * 3, b), t),
    "a tied embedding": lambda x, w, b, t: plain(F.embedding(t.clamp(0), w) * x, w, b, t),
}


@pytest.mark.quick(
    "upcast", "log_softmax and nll_loss", "no reduction", "another ignored class", "class weights, no reduction",
    "a factor and a soft cap", "label smoothing, class weights", "the sum of the log probabilities", "two heads",
    "a tied embedding",
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_torch(name):
    fn = CASES[name]
    x, weight, bias, target = operands()
    gm = joint(fn, x, weight, bias, target)
    report = applied(PASS, gm)
    assert report.rewritten == (2 if name == "two heads" else 1), report.refused
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of class weights
    try:
        loss = fn(*exact, target)
    finally:
        torch.set_default_dtype(before)
    gradients = torch.autograd.grad(loss, exact, allow_unused=True)
    found, mine = step(gm, x, weight, bias, target)
    torch.testing.assert_close(found.double(), loss.double(), rtol=1e-5, atol=1e-6)
    for one, other in zip(mine, gradients, strict=False):
        if other is not None:
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6 * float(1 + other.abs().max()))


def test_all_targets_ignored_is_nan_as_in_eager():
    x, weight, bias, target = operands()
    gm = joint(plain, x, weight, bias, target)
    applied(PASS, gm)
    loss, (d_x, *_) = step(gm, x, weight, bias, torch.full_like(target, -100))
    assert loss.isnan()
    eager = torch.autograd.grad(plain(x, weight, bias, torch.full_like(target, -100)), x)[0]
    torch.testing.assert_close(d_x, eager, equal_nan=True)


def test_an_ignored_row_with_an_infinite_loss_does_not_count():
    x, weight, bias, target = operands()
    with torch.no_grad():
        bias[0] = -math.inf  # the class that takes the place of an ignored one
    fn = CASES["a bias"]
    target = target.clone()
    target[0] = 7
    gm = joint(fn, x, weight, bias, target)
    applied(PASS, gm)
    loss, (d_x, *_) = step(gm, x, weight, bias, target)
    eager = fn(x, weight, bias, target)
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(d_x, torch.autograd.grad(eager, x)[0])


REFUSED = {
    "logits whose gradient is asked for": (
        lambda x, w, b, t: _with_logits(F.linear(x, w), t),
        "the gradient of the logits is also made by tangents_2",
    ),
    "smoothing by learned class weights": (
        lambda x, w, b, t: _smoothed_by(b, F.log_softmax(F.linear(x, w), -1), t),
        "the log probabilities are also read by",
    ),
    "smoothing by other class weights": (
        lambda x, w, b, t: _smoothed_by(b.detach(), F.log_softmax(F.linear(x, w), -1), t),
        "the log probabilities are also read by",
    ),
    "two sums": (
        lambda x, w, b, t: _summed_twice(F.log_softmax(F.linear(x, w), -1), t),
        "the log probabilities are also read by",
    ),
    "an entropy": (
        lambda x, w, b, t: _with_entropy(F.log_softmax(F.linear(x, w), -1), t),
        "the log probabilities are also read by",
    ),
    "rounded logits": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w).bfloat16(), t),
        "rounds the logits or upcasts them to float64",
    ),
    "logits in float64": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w).double(), t),
        "rounds the logits or upcasts them to float64",
    ),
    "fewer classes": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w)[:, :290], t.clamp(max=200)),
        "moves the classes from the last dimension",
    ),
    "a learned temperature": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w) * b[0], t),
        "the logits are multiplied by a tensor",
    ),
    "a negative cap": (
        lambda x, w, b, t: F.cross_entropy(-3 * torch.tanh(F.linear(x, w)), t),
        "have two soft caps or a negative one",
    ),
    "a large factor": (
        lambda x, w, b, t: F.cross_entropy(F.linear(x, w) * -1e8, t),
        "the logits are multiplied by more than 1000",
    ),
    "a large cap": (
        lambda x, w, b, t: F.cross_entropy(torch.tanh(F.linear(x, w)) * 1e8, t),
        "the logits are multiplied by more than 1000",
    ),
    "a gradient that a hook scales": (lambda x, w, b, t: _hooked(F.linear(x, w), t), "is not that of their scaling"),
    "a residual": (
        lambda x, w, b, t: F.cross_entropy(torch.addmm(x @ w.t() * 0.5, x, w.t()), t),
        "addmm with an addend that is not a bias",
    ),
}


def _with_logits(logits, target):
    return F.cross_entropy(logits, target), logits


def _with_entropy(log_p, target):
    return F.nll_loss(log_p, target) + (log_p.exp() * log_p).sum()


def _smoothed_by(weights, log_p, target):
    return F.nll_loss(log_p, target) - (log_p * weights).sum(-1).mean()


def _summed_twice(log_p, target):
    return F.nll_loss(log_p, target) - log_p.sum(-1).mean() + log_p.sum(0).square().sum()


def _hooked(logits, target):
    logits.register_hook(lambda grad: grad * 0.5)
    return F.cross_entropy(logits, target)


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_and_says_why(name):
    fn, reason = REFUSED[name]
    x, weight, bias, target = operands()
    gm = joint(fn, x, weight, bias, target)
    before = graph_text(gm)
    report = applied(PASS, gm)
    assert report.rewritten == 0
    assert len(report.refused) == 1, report.refused
    assert reason in report.refused[0][1]
    assert graph_text(gm) == before


def test_a_loss_of_other_scores_is_no_match():
    x, _, _, target = operands()
    gm = joint(lambda x, t: F.cross_entropy(x.tanh(), t.clamp(0, 3)), x, target)
    assert applied(PASS, gm).refused == ()


def test_small_logits_stay_whole_and_blocks_are_about_equal():
    gm = joint(plain, *operands())
    assert applied(FuseLinearCrossEntropy(), gm).rewritten == 0
    applied(FuseLinearCrossEntropy(min_bytes=0), gm)
    assert [n.args[6] for n in calls(gm.graph, FUSED[0])] == [384]  # one block, in whole tiles
    two = joint(plain, *operands())
    applied(FuseLinearCrossEntropy(min_bytes=0, block_bytes=4 * ROWS * 256), two)
    assert [n.args[6] for n in calls(two.graph, FUSED[0])] == [256]


def test_more_rows_do_not_make_ever_more_blocks():
    gm = joint(plain, *operands())
    applied(FuseLinearCrossEntropy(min_bytes=0, block_bytes=1, max_blocks=2), gm)
    assert [n.args[6] for n in calls(gm.graph, FUSED[0])] == [256]


def test_sizes_are_those_of_a_chip_that_has_a_part_of_the_rows():
    size = 4 * ROWS * CLASSES
    for parts, block in ((1, [128]), (2, [256]), (4, [])):
        gm = joint(plain, *operands())
        applied(FuseLinearCrossEntropy(min_bytes=size // 2, block_bytes=4 * ROWS * 128, batch_parts=parts), gm)
        assert [n.args[6] for n in calls(gm.graph, FUSED[0])] == block


def test_casts_give_it_bfloat16_operands_and_float32_gradients():
    gm = joint(plain, *operands())
    applied(PASS, gm)
    applied(CastBf16(), gm)
    forward, backward = calls(gm.graph, *FUSED)
    for node, positions in ((forward, (0, 1)), (backward, (1, 2))):
        assert {node.args[p].meta["val"].dtype for p in positions} == {torch.bfloat16}
    assert {value.dtype for value in (*forward.meta["val"][:3], *backward.meta["val"])} == {torch.float32}


KEEPING = FuseLinearCrossEntropy(min_bytes=0, block_bytes=BLOCK_BYTES, kept_bytes=2 * ROWS * CLASSES)


def test_small_exponentials_are_saved_for_the_backward():
    gm = joint(plain, *operands())
    applied(KEEPING, gm)
    applied(CastBf16(), gm)
    forward, backward = calls(gm.graph, *FUSED)
    assert forward.kwargs == {"keep": True}
    exponentials, loss = backward.args[12:]
    assert (exponentials.args, loss.args) == ((forward, 3), (forward, 0))
    assert (exponentials.meta["val"].shape, exponentials.meta["val"].dtype) == ((ROWS, CLASSES), torch.bfloat16)


def test_the_losses_of_a_graph_share_the_bytes():
    """Such as those of chunks, which users compute one by one to save memory."""

    def chunked(x, weight, bias, target):
        logits = (F.linear(part, weight) for part in x.chunk(3))
        return sum(F.cross_entropy(*pair, reduction="sum") for pair in zip(logits, target.chunk(3), strict=True))

    gm = joint(chunked, *operands())
    assert applied(dataclasses.replace(KEEPING, kept_bytes=2 * ROWS * CLASSES - 1), gm).rewritten == 3
    assert sum(bool(n.kwargs.get("keep")) for n in calls(gm.graph, FUSED[0])) == 2


def _capped(x, weight, bias, target):
    return F.cross_entropy(3 * torch.tanh(F.linear(x, weight) / 3), target)


def _returned(x, weight, bias, target):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits, target), logits.argmax(-1)


@pytest.mark.parametrize("case", ["larger", "a soft cap", "read elsewhere"])
def test_exponentials_that_are_not_saved(case):
    fuse = dataclasses.replace(KEEPING, kept_bytes=KEEPING.kept_bytes - (case == "larger"))
    loss = {"larger": plain, "a soft cap": _capped, "read elsewhere": _returned}[case]
    gm = joint(loss, *operands())
    assert applied(fuse, gm).rewritten == 1
    assert not any(n.kwargs.get("keep") for n in calls(gm.graph, FUSED[0]))


@pytest.mark.parametrize(
    ("options", "is_kept"),
    [
        ({}, True),
        ({"checkpoint": "off"}, True),
        ({"checkpoint": "blocks"}, False),
        ({"checkpoint": "attention"}, False),
        ({"precision": "float32"}, False),
        ({"keep_float32": ("mm",)}, False),
        ({"memory_budget_gb": 1e-9}, False),
    ],
)
def test_options_that_save_exponentials(options, is_kept):
    fuse = next(p for p in build_pipeline(CompileOptions(**options)) if p.name == PASS.name)
    assert (fuse.kept_bytes > 0) == is_kept


def test_keep_float32_keeps_the_head():
    gm = joint(plain, *operands())
    applied(PASS, gm)
    applied(CastBf16(keep_float32=("kp.linear_cross_entropy",)), gm)
    forward, _ = calls(gm.graph, *FUSED)
    assert forward.args[0].meta["val"].dtype == torch.float32


def test_it_is_part_of_fuse():
    with_it = [p.name for p in build_pipeline(CompileOptions())]
    assert with_it.index(PASS.name) < with_it.index("cast_bf16")
    assert PASS.name not in [p.name for p in build_pipeline(CompileOptions(fuse=False))]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embedding(ids).tanh()).view(-1, CLASSES), ids.view(-1))


def test_a_step_through_the_backend_and_a_longer_second_call(monkeypatch):
    rewritten = fuse_small_heads(monkeypatch)
    model = Model()
    eager = copy.deepcopy(model).double()
    step = torch.compile(model, backend="kp_tpu", options={"precision": "float32"})
    for length in (5, 9, 7):
        ids = torch.arange(2 * length).view(2, length)
        for one in (model, eager):
            one.zero_grad()
        loss, expected = step(ids), eager(ids)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-6)

    assert rewritten == [1] * len(rewritten)
    assert rewritten


def test_gradients_from_saved_exponentials(monkeypatch):
    """Of rows that are sure of their target, whose gradient a rounded softmax would drown."""
    rewritten = fuse_small_heads(monkeypatch)
    x, weight, _, target = (t.detach() for t in operands())
    target = target.clamp(min=0)
    x = 4 * weight[target] + 0.1 * x
    exact = [t.double().requires_grad_() for t in (x, weight)]
    loss = F.cross_entropy(F.linear(*exact), target, reduction="sum")
    loss.backward()

    def gradients(options):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        step = torch.compile(
            lambda x, w: F.cross_entropy(F.linear(x, w), target, reduction="sum"), backend="kp_tpu", options=options
        )
        step(*leaves).backward()
        return [t.grad for t in leaves]

    found = gradients({}), gradients({"checkpoint": "attention"})  # saved, and computed again
    for saved, computed, true in zip(*found, (t.grad for t in exact), strict=True):
        error, usual = ((t.double() - true).norm() for t in (saved, computed))
        assert error <= 1.5 * usual + 2.0**-9 * true.norm()
    assert len(rewritten) >= 2
    assert any(not torch.equal(*pair) for pair in zip(*found, strict=True))
