"""Gradient checkpointing from the option to the gradients: equal in every mode, and never another dropout."""

from __future__ import annotations

import re

import pytest
import torch
import torch_xla
from torch.utils.checkpoint import checkpoint

from kp_dynamo import explain
from kp_dynamo.exceptions import TPUConfigurationError, TPUOutOfMemoryError
from kp_dynamo.ops.optimization_barrier import barriers
from tests.spine import compiled, counted
from tests.transformer import TinyGpt

QUICK_MODES = ["blocks"]
MODES = ["attention", *QUICK_MODES, 0.0, 0.6, "auto"]
TOKENS = torch.arange(512).reshape(8, 64) % 32


def gradients(run, model):
    model.zero_grad()
    torch.manual_seed(3)
    run(TOKENS).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def model_and_reference(dropout=0.0):
    torch.manual_seed(0)
    model = TinyGpt(length=64, dropout=dropout)
    return model, gradients(compiled(model, checkpoint="off"), model)


def difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("modes", [QUICK_MODES, pytest.param(MODES, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_gradients_are_equal_in_every_mode(modes):
    """With dropout: masks that were drawn again would be others."""
    model, expected = model_and_reference(0.1)
    for mode in modes:
        torch._dynamo.reset()
        budget = {"memory_budget_gb": 0.010, "optimizer_state_factor": 0} if mode == "auto" else {}
        run = compiled(model, checkpoint=mode, **budget)
        assert difference(gradients(run, model), expected) < 1e-5, mode


def test_eager_agrees():
    model, found = model_and_reference()
    assert difference(found, gradients(model, model)) < 1e-5


@pytest.mark.slow
def test_default_levels_recompute_scores():
    model, _ = model_and_reference()
    options = {"disable_passes": ["rewrite_attention"]}  # which leaves no scores
    rewritten = {p.name: p.rewritten for p in explain(model, TOKENS, options=options).passes}
    assert rewritten["checkpoint_attention"] > 0
    assert rewritten["checkpoint_auto"] == 0  # there is room
    assert "checkpoint_attention" not in {p.name for p in explain(model, TOKENS, options={"checkpoint": "auto"}).passes}


def test_auto_recomputes_nothing_while_memory_suffices():
    model, _ = model_and_reference()
    found = explain(model, TOKENS, options={"checkpoint": "auto", "memory_budget_gb": 16})
    assert [p.rewritten for p in found.passes if p.name == "checkpoint_auto"] == [0]


def test_auto_reports_its_decision():
    model, _ = model_and_reference()
    options = {"checkpoint": "auto", "memory_budget_gb": 0.010, "optimizer_state_factor": 0, "precision": "float32"}
    [decided] = [p for p in explain(model, TOKENS, options=options).passes if p.name == "checkpoint_auto"]
    assert decided.rewritten > 0
    assert "are recomputed" in decided.notes[0]
    assert "GFLOP: by estimate" in decided.notes[0]


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can():
    model, _ = model_and_reference()
    run = compiled(model, checkpoint="auto", memory_budget_gb=0.002, optimizer_state_factor=2)
    with pytest.raises(Exception, match=r"The smallest sufficient budget is 0\.0[0-9]{2} GB") as caught:
        run(TOKENS)
    assert isinstance(caught.value.inner_exception, TPUOutOfMemoryError)
    [smallest] = re.findall(r"sufficient budget is (\S+) GB", str(caught.value))
    torch._dynamo.reset()
    assert compiled(model, checkpoint="auto", memory_budget_gb=float(smallest))(TOKENS).isfinite()
    torch._dynamo.reset()
    with pytest.raises(Exception, match="The smallest sufficient budget"):
        compiled(model, checkpoint="auto", memory_budget_gb=float(smallest) - 0.001)(TOKENS)


def test_a_budget_that_the_optimizer_alone_exceeds_has_no_negative_figures():
    model, _ = model_and_reference()
    with pytest.raises(Exception, match=r"leave nothing of the 1\.9 MiB that the step may use") as caught:
        compiled(model, checkpoint="auto", memory_budget_gb=0.002, optimizer_state_factor=20)(TOKENS)
    message = str(caught.value.inner_exception)
    assert re.search(r"the states of the optimizer alone, \d+\.\d MiB, leave nothing", message)
    assert not re.search(r"-\d", message)
    assert "optimizer_state_factor=1 or 0" in message
    # It is on already.
    assert message.count("checkpoint=") == 1


@pytest.mark.parametrize("share", [-0.1, -1, 1.1, float("nan"), "0.5"])
def test_an_invalid_share_raises_with_the_allowed_values(share):
    with pytest.raises(Exception, match=r"option checkpoint=.* Allowed: .*'auto', a number >= 0 and <= 1") as caught:
        compiled(torch.sin, checkpoint=share)(torch.ones(2))
    assert isinstance(caught.value.inner_exception, TPUConfigurationError)


@pytest.mark.slow
def test_optimizer_state_takes_its_room():
    model, _ = model_and_reference()
    options = {"checkpoint": "auto", "memory_budget_gb": 0.0105, "precision": "float32"}
    rewritten = {
        factor: next(
            p.rewritten
            for p in explain(model, TOKENS, options={**options, "optimizer_state_factor": factor}).passes
            if p.name == "checkpoint_auto"
        )
        for factor in (0, 2.0)
    }
    assert rewritten[0] < rewritten[2.0]


@pytest.mark.parametrize("mode", [*(pytest.param(m, marks=pytest.mark.slow) for m in ("off", "attention")), "blocks"])
def test_checkpoints_of_the_user_keep_working(mode):
    """Their dropout too: it is drawn once, where eager draws the same mask again."""
    model, expected = model_and_reference(0.1)

    def forward(tokens):
        x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return torch.nn.functional.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens.flatten())

    assert difference(gradients(compiled(forward, checkpoint=mode), model), expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"checkpoint": "blocks"}, {"checkpoint": 0.3}], ids=str)
def test_a_dynamic_length_stays_dynamic(options):
    """To compare or multiply out a symbolic size asks for its value, and a graph for one length is what comes of it."""
    model = TinyGpt(length=64)
    run = compiled(model, **options)
    with torch._dynamo.config.patch(specialize_float=True), counted() as counts:
        for length in (20, 64, 33):
            tokens = torch.zeros(2, length, dtype=torch.int64)
            torch._dynamo.mark_dynamic(tokens, 1)
            torch.testing.assert_close(run(tokens), model(tokens), rtol=1e-5, atol=1e-5)
    assert counts.aot_traces == 1


def on_device(*values):
    return [v.to(torch_xla.device()) for v in values]


def test_the_form_for_the_cpu_is_a_dependency_and_keeps_every_value():
    values = torch.tensor([1.0, -0.0, torch.nan, torch.inf])
    for signal in (torch.tensor([2.0]), torch.tensor([torch.nan]), torch.tensor([torch.inf]), torch.tensor([[-1.0]])):
        first, second, passed = torch.ops.kp.optimization_barrier(
            on_device(values, torch.tensor([3, 4])), on_device(signal)[0]
        )
        torch.testing.assert_close(first.cpu(), values, rtol=0, atol=0, equal_nan=True)
        assert first.cpu().signbit().tolist() == values.signbit().tolist()
        assert second.cpu().tolist() == [3, 4]
        torch.testing.assert_close(passed.cpu(), signal, equal_nan=True)


def test_the_forms_in_the_program():
    values, signal = on_device(torch.ones(4), torch.ones(2))
    dependency = torch.ops.kp.optimization_barrier([values.sin()], signal)
    text = torch_xla._XLAC._get_xla_tensors_hlo(dependency)
    assert "select" in text
    assert "opt-barrier" not in text
    from kp_dynamo.compat import xla

    with barriers(xla.optimization_barrier):
        text = torch_xla._XLAC._get_xla_tensors_hlo(torch.ops.kp.optimization_barrier([values.sin()], signal))
    assert "opt-barrier" in text
    assert "select" not in text


def test_eager_is_the_identity():
    values = [torch.ones(2), torch.zeros(3, dtype=torch.int64)]
    found = torch.ops.kp.optimization_barrier(values, torch.ones(()))
    assert [t.tolist() for t in found] == [[1.0, 1.0], [0, 0, 0], 1.0]


CALLS = []


@torch.library.custom_op("test_checkpointing::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(x.shape)
    return x * len(CALLS)


@scaled.register_fake
def _(x):
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, gradient: gradient)


def attended(q, k, v):
    x = q.sin()
    return scaled(x @ k.mT).softmax(-1) @ v + x


def in_a_region(q, k, v):
    return checkpoint(attended, q, k, v, use_reentrant=False)


@pytest.mark.parametrize(
    ("fn", "options", "num_calls"),
    [(attended, {}, 1), (attended, {"checkpoint": "blocks"}, 1), (in_a_region, {"checkpoint": 0.0}, 2)],
    ids=["default", "blocks", "region of the user"],
)
def test_an_operator_of_the_user_s_own_is_recomputed_only_where_eager_recomputes_it(fn, options, num_calls):
    """It counts its calls: a second one has another result."""
    leaves = [torch.linspace(-1, 1, 24).view(2, 3, 4).requires_grad_() for _ in range(3)]
    found = []
    for run in (fn, compiled(fn, **options)):
        CALLS.clear()
        found.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
        assert len(CALLS) == num_calls
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
