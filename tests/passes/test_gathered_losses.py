"""FuseLinearCrossEntropy on losses written with gather or an index, and on a z-loss beside them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from kp_dynamo.graph.nodes import calls
from kp_dynamo.passes.fold_constants import FoldConstants
from kp_dynamo.passes.fuse_linear_cross_entropy import FuseLinearCrossEntropy
from tests.cross_entropies import BLOCK_BYTES, CLASSES, ROWS, WIDTH, fuse_small_heads, joint, operands, step
from tests.graphs import applied, graph_text, trace_inference

aten, kp = torch.ops.aten, torch.ops.kp
PASS = FuseLinearCrossEntropy(min_bytes=0, block_bytes=BLOCK_BYTES)
FUSED = (kp.linear_cross_entropy.default, kp.linear_cross_entropy_backward.default)


def picked(values: Tensor, target: Tensor) -> Tensor:
    return values.gather(-1, target.clamp(0)[..., None]).squeeze(-1)


def nll(logits: Tensor, target: Tensor) -> Tensor:
    """As in most training loops."""
    return -picked(logits.log_softmax(-1), target)


def difference(logits: Tensor, target: Tensor) -> Tensor:
    return logits.logsumexp(-1) - picked(logits, target)


def masked_mean(loss: Tensor, target: Tensor) -> Tensor:
    return (loss * (target >= 0)).sum() / (target >= 0).sum()


def of_sequences(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] and targets [B, S]."""
    return F.linear(x.view(2, 3, WIDTH), w), t.view(2, 3)


def t5(logits: Tensor, target: Tensor, share: float = 0.1) -> Tensor:
    """The loss of T5X, and its z-loss, in PyTorch."""
    log_z = logits.logsumexp(-1)
    return masked_mean(log_z - picked(logits, target) + share * log_z.square(), target)


def olmo(logits: Tensor, target: Tensor) -> Tensor:
    """`cross_entropy_loss(compute_z_loss=True)` of OLMo."""
    z_squared = logits.logsumexp(-1).pow(2)
    return F.cross_entropy(logits, target) + 0.1 * (z_squared * (target != -100)).mean()


def palm(logits: Tensor, target: Tensor) -> Tensor:
    flat = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return flat + 0.1 * torch.logsumexp(logits, dim=-1).square().mean()


def z_first(logits: Tensor, target: Tensor) -> Tensor:
    """The targets are computed after the log-sum-exp is read."""
    z_loss = logits.logsumexp(-1).square().mean()
    return F.cross_entropy(logits, F.pad(target, (0, 1), value=-100)[1:]) + 0.1 * z_loss


def shifted(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    logits, labels = of_sequences(x, w, t)
    logits = logits[:, :-1].float()
    return (nll(logits, labels[:, 1:]) + 0.1 * logits.logsumexp(-1).square()).sum()


CASES = {
    "gather": lambda x, w, b, t: nll(F.linear(x, w), t).mean(),
    "gather, a masked mean": lambda x, w, b, t: masked_mean(nll(*of_sequences(x, w, t)), t.view(2, 3)),
    "gather, weights of tokens": lambda x, w, b, t: (nll(F.linear(x, w, b), t) * torch.arange(float(ROWS))).sum(),
    "gather, no reduction": lambda x, w, b, t: nll(F.linear(x, w, b) / 8, t).square().sum(),
    "gather of negative log probabilities": lambda x, w, b, t: picked(-F.log_softmax(F.linear(x, w), -1), t).sum(),
    "gather of reshaped log probabilities": lambda x, w, b, t: picked(
        of_sequences(x, w, t)[0].log_softmax(-1).view(-1, CLASSES), t
    ).mean(),
    "gather, a soft cap": lambda x, w, b, t: nll(3 * torch.tanh(F.linear(x, w) / 3), t).mean(),
    "gather, ratios of probabilities": lambda x, w, b, t: nll(F.linear(x, w), t).neg().exp().sum(),
    "an index": lambda x, w, b, t: -F.linear(x, w).log_softmax(-1)[torch.arange(ROWS), t.clamp(0)].mean(),
    "a negative index": lambda x, w, b, t: F.linear(x, w, b).log_softmax(-1)[range(ROWS), t.clamp(0) - CLASSES].sum(),
    "a difference": lambda x, w, b, t: difference(F.linear(x, w), t).mean(),
    "a difference, a masked mean": lambda x, w, b, t: masked_mean(difference(*of_sequences(x, w, t)), t.view(2, 3)),
    "a negative difference": lambda x, w, b, t: (
        (y := F.linear(x, w, b)).gather(1, t.clamp(0)[:, None]) - y.logsumexp(1, keepdim=True)
    ).mean(),
    "a difference of an index": lambda x, w, b, t: (
        (y := F.linear(x, w)).logsumexp(1) - y[torch.arange(ROWS), t.clamp(0)]
    ).sum(),
    "a difference written as a sum": lambda x, w, b, t: (
        -picked(y := F.linear(x, w), t) + y.logsumexp(1)
    ).square().sum(),
    "a difference without the gradient of its total": lambda x, w, b, t: (
        (y := F.linear(x, w)).logsumexp(1).detach() - picked(y, t)
    ).square().sum(),
    "t5": lambda x, w, b, t: t5(F.linear(x, w, b), t),
    "t5, sequences": lambda x, w, b, t: t5(*of_sequences(x, w, t)),
    "t5, two totals": lambda x, w, b, t: difference(y := F.linear(x, w), t).mean() + y.logsumexp(1).square().mean(),
    "olmo": lambda x, w, b, t: olmo(F.linear(x, w, b), t),
    "palm": lambda x, w, b, t: palm(*of_sequences(x, w, t)),
    "palm, a soft cap": lambda x, w, b, t: palm(*(of_sequences(x, w, t)[0].div(2).tanh().mul(2), t.view(2, 3))),
    "a z-loss, then a shift": lambda x, w, b, t: z_first(F.linear(x, w), t),
    "shifted, a z-loss": lambda x, w, b, t: shifted(x, w, t),
    "a z-loss, label smoothing": lambda x, w, b, t: (
        F.cross_entropy(y := F.linear(x, w), t, label_smoothing=0.1) + 0.1 * y.logsumexp(1).square().sum()
    ),
    "a z-loss without a gradient": lambda x, w, b, t: F.cross_entropy(y := F.linear(x, w), t) * (
        1 + y.logsumexp(1).detach().mean()
    ),
    "a z-loss alone has a gradient": lambda x, w, b, t: (
        F.cross_entropy(y := F.linear(x, w), t).detach() + y.logsumexp(1).square().mean()
    ),
}  # fmt: skip


def norm(tensors: list[Tensor]) -> float:
    return float(torch.cat([t.detach().double().flatten() for t in tensors]).norm())


@pytest.mark.quick(
    "gather, a masked mean", "gather, no reduction", "gather of reshaped log probabilities",
    "gather, ratios of probabilities", "a negative index", "a difference of an index",
    "a difference without the gradient of its total", "palm, a soft cap", "shifted, a z-loss",
    "a z-loss, label smoothing", "a z-loss alone has a gradient",
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_torch(name):
    fn = CASES[name]
    x, weight, bias, target = operands()
    gm = joint(fn, x, weight, bias, target)
    report = applied(PASS, gm)
    assert report.rewritten == 1, report.refused
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    loss = fn(*exact, target)
    gradients = torch.autograd.grad(loss, exact, allow_unused=True)
    found, mine = step(gm, x, weight, bias, target)
    torch.testing.assert_close(found.double(), loss.double(), rtol=1e-6, atol=1e-6)
    pairs = [(one, other) for one, other in zip(mine, gradients, strict=False) if other is not None]
    # Sums of 300 float32 terms of about equal size: the norms of both differ by some 1e-7.
    assert norm([one - other for one, other in pairs]) < 1e-6 * (1 + norm([other for _, other in pairs]))
    assert [one for one, other in zip(mine, gradients, strict=False) if other is None] in ([], [None])
    assert not list(calls(gm.graph, aten._log_softmax.default, aten.logsumexp.default, aten.scatter_add.default))


@pytest.mark.parametrize("name", ["gather", "a difference, a masked mean", "a negative index", "olmo", "t5"])
def test_inference_stays(name):
    x, weight, bias, target = (t.detach() for t in operands())
    gm = trace_inference(CASES[name], x, weight, bias, target)
    FoldConstants()(gm)
    before = gm(x, weight, bias, target)[0]
    report = applied(PASS, gm)
    assert report.rewritten == 1, report.refused
    torch.testing.assert_close(gm(x, weight, bias, target)[0], before, rtol=1e-6, atol=1e-6)
    assert not list(calls(gm.graph, aten.mm.default, aten.addmm.default))


def test_the_loss_of_a_graph_for_inference():
    x, weight, _, target = (t.detach() for t in operands())
    gm = trace_inference(lambda x, w, t: t5(F.linear(x, w), t), x, weight, target)
    applied(PASS, gm)
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: f32[6, 4] = input
arg1_1: f32[300, 4] = input
arg2_1: i64[6] = input
clamp: i64[6] = aten.clamp.default(arg2_1, 0)
unsqueeze: i64[6, 1] = aten.unsqueeze.default(clamp, 1)
reshape_default: i64[6] = aten.reshape.default(unsqueeze, [-1])
linear_cross_entropy_default = kp.linear_cross_entropy.default(arg0_1, arg1_1, None, reshape_default, 1.0, 0.0, 128)
getitem: f32[6] = <built-in function getitem>(linear_cross_entropy_default, 0)
getitem_1: f32[2, 6] = <built-in function getitem>(linear_cross_entropy_default, 1)
sum_dim_int_list_1: f32[6] = aten.sum.dim_IntList(getitem_1, [0])
pow_1: f32[6] = aten.pow.Tensor_Scalar(sum_dim_int_list_1, 2)
mul: f32[6] = aten.mul.Tensor(pow_1, 0.1)
add: f32[6] = aten.add.Tensor(getitem, mul)
ge: b8[6] = aten.ge.Scalar(arg2_1, 0)
mul_1: f32[6] = aten.mul.Tensor(add, ge)
sum_1: f32[] = aten.sum.default(mul_1)
ge_1: b8[6] = aten.ge.Scalar(arg2_1, 0)
sum_2: i64[] = aten.sum.default(ge_1)
div: f32[] = aten.div.Tensor(sum_1, sum_2)
return (div,)""",
    )


def test_the_gradient_of_a_difference_cancels():
    """The operator gets the gradient of the loss, and of the log-sum-exp what the z-loss alone sends."""
    with_z, alone = (joint(CASES[name], *operands()) for name in ("t5", "a difference"))
    for gm in (with_z, alone):
        applied(PASS, gm)
    (call,) = calls(with_z.graph, FUSED[1])
    assert call.args[9:11] == (None, None)
    assert [n.target for n in call.args[11].all_input_nodes] == [aten.mul.Tensor, aten.mul.Scalar]
    (call,) = calls(alone.graph, FUSED[1])
    assert len(call.args) == 9


def test_a_second_run_changes_nothing():
    for name in ("gather", "t5", "olmo"):
        gm = joint(CASES[name], *operands())
        applied(PASS, gm)
        text = graph_text(gm)
        assert applied(PASS, gm).rewritten == 0
        assert graph_text(gm) == text


READ: dict[str, object] = {
    "accuracy": lambda x, w, b, t: _with_accuracy(F.linear(x, w), t),
    "returned": lambda x, w, b, t: _returned(F.linear(x, w), t),
}


def _with_accuracy(logits, target):
    return nll(logits, target).mean(), (logits.argmax(-1) == target).float().mean()


def _returned(logits, target):
    return t5(logits, target), logits.detach()


@pytest.mark.parametrize("name", READ)
def test_logits_with_another_reader_are_whole_in_the_forward_alone(name):
    x, weight, bias, target = operands()
    gm = joint(READ[name], x, weight, bias, target)
    assert applied(PASS, gm).rewritten == 1
    assert [n.target for n in calls(gm.graph, *FUSED)] == [FUSED[1]]
    (loss, other), gradients = gm([x, weight, bias, target], [torch.ones(())])
    expected = READ[name](x, weight, bias, target)
    torch.testing.assert_close((loss, other), (expected[0].detach(), expected[1]))
    wanted = torch.autograd.grad(expected[0], (x, weight))
    torch.testing.assert_close(gradients[:2], list(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
def test_only_some_gradients_are_asked_for(frozen):
    x, weight, bias, target = operands()
    inputs = [t.detach() if i in frozen else t for i, t in enumerate((x, weight, bias))]
    fn = CASES["t5"]
    gm = joint(fn, *inputs, target)
    assert applied(PASS, gm).rewritten == 1
    _, mine = step(gm, *(t.detach() for t in inputs), target)
    gradients = iter(torch.autograd.grad(fn(*inputs, target), [t for t in inputs if t.requires_grad]))
    for one, tensor in zip(mine, inputs, strict=False):
        assert (one is not None) == tensor.requires_grad
        if one is not None:
            torch.testing.assert_close(one, next(gradients), rtol=1e-5, atol=1e-6)


def _two_targets(logits, target):
    return nll(logits, target).mean() + nll(logits, target.flip(0)).mean()


def _with_entropy(log_p, target):
    return picked(log_p, target).sum() + (log_p.exp() * log_p).sum()


def _of_other_rows(logits, target):
    return nll(logits[1:], target[1:]).mean() + logits.logsumexp(1).square().mean()


def _scaled_otherwise(logits, target):
    return nll(logits / 2, target).mean() + logits.logsumexp(1).square().mean()


def _hooked(logits, target):
    logits.register_hook(lambda grad: grad * 0.5)
    return t5(logits, target)


def _targets_of_totals(logits, target):
    total = logits.logsumexp(1)
    return (total - picked(logits, (total > 0).long())).mean()


REFUSED = {
    "two targets": (_two_targets, "the gradient of the logits is also made by"),
    "an entropy": (lambda y, t: _with_entropy(y.log_softmax(-1), t), "the log probabilities are also read by"),
    "a z-loss of other rows": (_of_other_rows, "the gradient of the logits is also made by"),
    "a z-loss of other logits": (_scaled_otherwise, "the gradient of the logits is also made by"),
    "a gradient that a hook scales": (_hooked, "is not that of their scaling"),
    "targets computed from the loss": (_targets_of_totals, "its targets are computed from its loss"),
    "rounded logits": (lambda y, t: nll(y.bfloat16(), t).mean(), "rounds the logits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_and_says_why(name):
    fn, reason = REFUSED[name]
    x, weight, _, target = operands()
    gm = joint(lambda x, w, t: fn(F.linear(x, w), t), x, weight, target)
    before = graph_text(gm)
    report = applied(PASS, gm)
    assert report.rewritten == 0
    assert report.refused
    assert all(reason in why for _, why in report.refused), report.refused
    assert graph_text(gm) == before


@pytest.mark.parametrize(
    "fn",
    [
        lambda y, t: picked(y, t).square().mean(),  # Q-learning
        lambda y, t: picked(y.softmax(-1), t).log().mean(),
        lambda y, t: y.log_softmax(-1).gather(-1, t.clamp(0).view(2, 3)).mean(),
    ],
)
def test_other_gathers_are_no_match(fn):
    x, weight, _, target = operands()
    gm = joint(lambda x, w, t: fn(F.linear(x, w), t), x, weight, target)
    assert (applied(PASS, gm).rewritten, applied(PASS, gm).refused) == (0, ())


class Model(nn.Module):
    """A language model with the loss of T5X."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits = F.dropout(self.head(self.embedding(ids).tanh()), 0.0)
        labels = F.pad(ids[:, 1:], (0, 1), value=-100)
        return t5(logits, labels) + masked_mean(nll(self.head(self.embedding(ids).sin()), labels), labels)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"buckets": [4, 8, 16]}], ids=["", "buckets"])
def test_steps_through_the_backend_of_several_lengths(monkeypatch, options):
    rewritten = fuse_small_heads(monkeypatch)
    model = Model()
    eager = copy.deepcopy(model).double()
    compiled = torch.compile(model, backend="kp_tpu", options={"precision": "float32", **options})
    for length in (5, 9, 7):
        ids = torch.arange(2 * length).view(2, length)
        for one in (model, eager):
            one.zero_grad()
        loss, expected = compiled(ids), eager(ids)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-6)
    assert options or 2 in rewritten


def test_bfloat16_errs_as_rounded_operands_do(monkeypatch):
    fuse_small_heads(monkeypatch)
    model, ids = Model(), torch.arange(14).view(2, 7)
    loss = torch.compile(model, backend="kp_tpu", options={"level": "balanced"})(ids)
    assert loss.dtype == torch.float32
    # Four products of numbers that are rounded by up to 2 ** -9, and logits of up to about 2.
    torch.testing.assert_close(loss.double(), copy.deepcopy(model).double()(ids), rtol=2.0**-7, atol=2.0**-7)
