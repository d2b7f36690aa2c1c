"""Models that return their logits beside the loss: the head is fused, and the logits may still have a gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kp_dynamo.blocks.returned_logits import separate_logits
from tests.cross_entropies import fuse_small_heads

WIDTH, CLASSES = 4, 300


class Model(nn.Module):
    """As a language model of transformers: `kind` says what it does to the logits."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=kind == "bias")
        if kind == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        hidden = self.norm(self.embedding(ids))
        logits = self.head(hidden[:, slice(0, None)])
        if self.kind == "soft cap":
            logits = torch.tanh(logits / 3) * 3
        if self.kind == "upcast":
            logits = logits.float()
        loss = F.cross_entropy(logits.float().view(-1, CLASSES), ids.view(-1), ignore_index=1)
        if self.kind == "by hand":
            log_z = logits.logsumexp(-1)
            loss = (log_z - logits.gather(-1, ids[..., None]).squeeze(-1) + 0.1 * log_z**2).mean()
        match self.kind:
            case "hidden":
                return loss, hidden, logits
            case "view of them":
                return loss, logits, logits[:, -1]
            case "written":
                logits.mul_(2)
            case "accuracy":
                return loss, (logits.argmax(-1) == ids).float().mean(), logits
            case "another head":
                return loss, self.head(hidden * 2)
        return loss, logits


FUSED = ("plain", "bias", "tied", "soft cap", "upcast", "accuracy", "hidden", "another head", "by hand")
KINDS = (*FUSED, "view of them", "written")
USES = {
    "the loss": lambda loss, *_: loss,
    "the logits": lambda loss, *others: others[-1].square().mean(),
    "both": lambda loss, *others: loss * 2 + others[-1].square().mean(),
    "written logits": lambda loss, *others: loss + others[-1].mul_(2).square().mean(),
}


def ids_of(length):
    return torch.arange(3 * length).remainder(7).view(3, length)


def gradients(model, ids, use, device="cpu"):
    results = model(ids.to(device))
    value = USES[use](*results)
    value.backward()
    found = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    return [value, *results], found


def assert_as_eager(step, exact, ids, use, device="cpu"):
    for model in (step, exact):
        model.zero_grad()
    results, mine = gradients(step, ids, use, device)
    expected, wanted = gradients(exact, ids, use)
    for one, other in zip(results, expected, strict=True):
        assert one.requires_grad == other.requires_grad
        torch.testing.assert_close(one.detach().cpu().double(), other.detach().double(), rtol=1e-5, atol=1e-5)
    for name, other in wanted.items():
        assert (mine[name] is None) == (other is None), name
        if other is not None:
            torch.testing.assert_close(mine[name].cpu().double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("tied", "view of them", "upcast", "accuracy")
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_of_eager(kind, monkeypatch):
    rewritten = fuse_small_heads(monkeypatch)
    model = Model(kind)
    exact = copy.deepcopy(model).double()
    step = torch.compile(model, backend="kp_tpu", options={"precision": "float32"})
    for use in USES:
        if kind == "view of them" and use == "written logits":
            continue  # a write to one of two results that share memory: eager's autograd follows it, AOTAutograd's not
        if kind == "by hand" and use == "written logits":
            continue  # eager raises: its backward reads the logits
        assert_as_eager(step, exact, ids_of(5), use)
    assert rewritten == [kind in FUSED] * len(rewritten)
    assert rewritten


@pytest.mark.quick("cpu-{'checkpoint': 'blocks'}", "cpu-{'donate': 'mutated'}")
@pytest.mark.parametrize("options", [{"blocks": "on"}, {"checkpoint": "blocks"}, {"donate": "mutated"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_other_options_devices_and_lengths(options, device, monkeypatch):
    rewritten = fuse_small_heads(monkeypatch)
    model = Model()
    exact = copy.deepcopy(model).double()
    step = torch.compile(model.to(device), backend="kp_tpu", options={"precision": "float32", **options})
    for length, use in zip((5, 9, 7, 6), USES, strict=True):
        assert_as_eager(step, exact, ids_of(length), use, device)
    assert rewritten[-1] == 1


def test_padded_lengths_keep_the_gradient_in_the_graph(monkeypatch):
    fuse_small_heads(monkeypatch)
    model = Model()
    exact = copy.deepcopy(model).double()
    step = torch.compile(model, backend="kp_tpu", dynamic=True, options={"precision": "float32", "buckets": [8, 16]})
    for length, use in zip((5, 9, 7, 6), USES, strict=True):
        assert_as_eager(step, exact, ids_of(length), use)


class Accelerated(nn.Module):
    """As accelerate prepares a model: autocast around its forward, and results in float32."""

    def __init__(self, device) -> None:
        super().__init__()
        self.model, self.device = Model(), device

    def forward(self, ids):
        with torch.autocast(self.device, torch.bfloat16):
            loss, logits = self.model(ids)
        return loss, logits.float()


@pytest.mark.quick("xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_autocast_that_ends_before_the_logits_are_upcast(device, monkeypatch):
    rewritten = fuse_small_heads(monkeypatch)
    model = Accelerated(device).to(device)
    exact = copy.deepcopy(model)
    step = torch.compile(model, backend="kp_tpu", options={"precision": "float32"})
    rounded = []
    for one, run in ((model, step), (exact, exact)):
        run(ids_of(5).to(device))[1].square().sum().backward()
        rounded.append(one.model.head.weight.grad)
    torch.testing.assert_close(*rounded, rtol=2e-2, atol=2e-3)
    # The gradient that autocast rounds to bfloat16 is rounded here too.
    assert torch.equal(rounded[0], rounded[0].bfloat16().float())
    assert rewritten == [1]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("xla", marks=pytest.mark.slow)])
def test_autocast_around_the_head(inside, device, monkeypatch):
    """The gradient of the logits is computed under the autocast of the forward, as in eager."""
    rewritten = fuse_small_heads(monkeypatch)
    model = Model().to(device)
    exact = copy.deepcopy(model)

    def called(model):
        def run(ids):
            with torch.autocast(device, torch.bfloat16):
                return model(ids)

        return run

    if inside:
        step = torch.compile(called(model), backend="kp_tpu", options={"precision": "float32"})
    else:
        step = called(torch.compile(model, backend="kp_tpu", options={"precision": "float32"}))
    for use in ("the loss", "both"):
        for one, run in ((model, step), (exact, called(exact))):
            one.zero_grad()
            results = run(ids_of(5).to(device))
            assert results[1].dtype == torch.bfloat16
            USES[use](*results).backward()
        for mine, other in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=2e-2, atol=2e-3)
    assert rewritten[0] == 1


@pytest.mark.quick("weight, frozen body-xla")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("change", ["weight, frozen body", "hidden states, frozen head"])
def test_values_that_no_gradient_reads_may_change_before_the_backward(change, device, monkeypatch):
    rewritten = fuse_small_heads(monkeypatch)
    model = Model("hidden")
    model.head = nn.Linear(WIDTH, CLASSES)
    if "frozen body" in change:
        model.embedding.requires_grad_(False)
        model.norm.requires_grad_(False)
    model.head.requires_grad_("frozen head" not in change)
    exact = copy.deepcopy(model).double()
    step = torch.compile(model.to(device), backend="kp_tpu", options={"precision": "float32"})
    gradients = []
    for one, run in ((model, step), (exact, exact)):
        loss, hidden, logits = run(ids_of(5).to(next(one.parameters()).device))
        with torch.no_grad():
            (hidden.detach() if "hidden" in change else one.head.weight).mul_(2)
        (loss.detach() + logits.square().mean()).backward()
        gradients.append([p.grad for p in one.parameters()])
    for mine, other in zip(*gradients, strict=True):
        assert (mine is None) == (other is None)
        if other is not None:
            torch.testing.assert_close(mine.cpu().double(), other, rtol=1e-5, atol=1e-5)
    assert rewritten == [1]


def test_returned_hidden_states_are_not_on_the_way_of_the_logits(monkeypatch):
    """What users do with the gradient of their result must see all of it or, as with AOTAutograd, none of it."""
    fuse_small_heads(monkeypatch)
    step = torch.compile(Model("hidden"), backend="kp_tpu", options={"precision": "float32"})
    loss, hidden, logits = step(ids_of(5))
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss + logits.square().mean(), hidden)


def test_weights_that_change_before_the_backward_raise_as_in_eager(monkeypatch):
    fuse_small_heads(monkeypatch)
    model = Model()
    step = torch.compile(model, backend="kp_tpu", options={"precision": "float32"})
    _, logits = step(ids_of(5))
    with torch.no_grad():
        model.head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_a_graph_without_gradients_or_loss_is_left_alone():
    captured = []

    def keep(gm, inputs):
        captured.append(gm)
        return gm

    torch.compile(Model().requires_grad_(False), backend=keep)(ids_of(5))
    torch.compile(Model("another head"), backend=keep)(ids_of(5))
    assert [separate_logits(gm, 0) for gm in captured] == [None, None]
    torch._dynamo.reset()
    torch.compile(Model(), backend=keep)(ids_of(5))
    assert separate_logits(captured[-1], 1 << 30) is None
    assert separate_logits(captured[-1], 0).position == 1
