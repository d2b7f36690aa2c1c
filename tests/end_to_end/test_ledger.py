"""The option `ledger`: every pass is measured on the inputs of the call, and a wrong one is taken back."""

import contextlib
import json
import logging
import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import kp_dynamo
from kp_dynamo import PassReport, TPUConfigurationError, TPUOptimizationError, explain
from kp_dynamo.explanation.graph_reports import pass_from_dict
from tests.spine import on

mul = torch.ops.aten.mul.Tensor


@dataclass(frozen=True)
class Scale:
    """Multiplies every floating-point output of a graph by a factor: wrong unless it is 1."""

    factor: float = 1.01
    name = "scale"

    def __call__(self, gm):
        output = gm.graph.output_node()
        results, count = list(output.args[0]), 0
        for i, node in enumerate(results):
            value = node.meta["val"] if isinstance(node, torch.fx.Node) else None
            if isinstance(value, torch.Tensor) and value.is_floating_point() and node.op == "call_function":
                with gm.graph.inserting_before(output):
                    results[i] = gm.graph.call_function(mul, (node, self.factor))
                results[i].meta = dict(node.meta)
                count += 1
        output.args = (tuple(results),)
        return PassReport(self.name, count)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))


def with_ledger(model, **options):
    return torch.compile(model, backend="kp_tpu", options={"ledger": True, **options})


def rows(explanation, *, name=None):
    """The measured rows: (graph, pass) -> errors."""
    found = [p for p in explanation.passes if name in (None, p.name)]
    return {(p.graph, p.name): p.errors for p in found}


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "ledger" in r.getMessage()]


OTHER_WAYS = (("float32", "xla"), ("bfloat16", "cpu"))


def off(values, reference):
    return float((values.detach().cpu().double() - reference.detach().double()).norm() / reference.detach().norm())


@pytest.mark.parametrize(
    ("precision", "device"),
    [("float32", "cpu"), ("bfloat16", "xla"), *(pytest.param(*way, marks=pytest.mark.slow) for way in OTHER_WAYS)],
)
def test_a_wrong_pass_of_the_user_is_taken_back(device, precision, caplog):
    model, x = mlp(), torch.randn(16, 64)
    eager = model.double()(x.double())
    eager.sum().backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    model = model.float().to(on(device, x).device)
    result = with_ledger(model, precision=precision, extra_passes=[Scale()])(on(device, x))
    result.sum().backward()
    bound = 1e-5 if precision == "float32" else 6e-3
    assert off(result, eager) < bound
    assert off(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]), wanted) < bound
    (text,) = warnings_of(caplog)
    assert re.search(r"pass 'scale' exceeds its bound on graph \d+\.joint: the error of its results is 0\.0", text)


def test_without_the_ledger_the_wrong_pass_runs():
    model, x = mlp(), torch.randn(16, 64)
    wrong = torch.compile(model, backend="kp_tpu", options={"precision": "float32", "extra_passes": [Scale()]})(x)
    assert off(wrong, model(x)) == pytest.approx(0.01, rel=1e-3)


def test_every_pass_has_a_row(capsys):
    explanation = explain(mlp(), torch.randn(16, 64), options={"ledger": True, "extra_passes": [Scale()]})
    found = rows(explanation)
    assert all(errors is not None for errors in found.values())
    assert found["1.joint", "fold_constants"].reason == "the graph is unchanged"
    assert "known only at a call" in found["1.backward", "gate_recomputation"].reason
    cast, scale = found["1.joint", "cast_bf16"], found["1.joint", "scale"]
    assert 1e-3 < cast.exact.results < cast.bound.results < 0.01
    assert 1e-3 < cast.exact.gradients < cast.bound.gradients < 0.01
    assert cast.before.results == pytest.approx(cast.exact.results, rel=0.05)  # the graph before it is in float32
    fused = found["1.joint", "fuse_linear_activation"]
    assert fused.exact.results < fused.bound.results == 1e-5
    assert [p.name for p in explanation.passes if p.errors.is_taken_back] == ["scale"]
    assert scale.before.results == pytest.approx(0.01, rel=1e-2)
    text = explanation.text()
    assert re.search(r"1.joint +scale +1.0e-02", text)
    assert "TAKEN BACK, the graph is compiled without it" in text
    (report,) = [p for p in explanation.passes if p.name == "scale"]
    assert report.rewritten == 0
    assert report.notes[0].startswith("taken back by the ledger: the error of its results is 0.0")


def test_rows_are_json():
    explanation = explain(mlp(), torch.randn(4, 64), options={"ledger": True})
    content = json.loads(json.dumps(explanation.to_dict()))
    assert [pass_from_dict(p) for p in content["passes"]] == list(explanation.passes)


def test_without_the_option_nothing_is_measured():
    explanation = explain(mlp(), torch.randn(4, 64))
    assert set(rows(explanation).values()) == {None}
    assert "ledger" not in explanation.text()


def test_strict_raises():
    model = with_ledger(mlp(), strict=True, extra_passes=[Scale()])
    with pytest.raises(BackendCompilerFailed) as raised:
        model(torch.randn(16, 64))
    cause = raised.value.inner_exception
    assert isinstance(cause, TPUOptimizationError)
    assert "strict=True and pass 'scale' exceeds its bound" in str(cause)
    assert '"disable_passes": ["scale"]' in str(cause)


def test_inference_and_other_shapes_on_the_second_call(caplog):
    model = mlp().eval()
    compiled = with_ledger(model, precision="float32", extra_passes=[Scale()])
    with torch.no_grad():
        for rows_ in (16, 8, 24):
            x = torch.randn(rows_, 64)
            assert off(compiled(x), model(x)) < 1e-5
    assert all(".inference" in text for text in warnings_of(caplog))
    assert len(warnings_of(caplog)) == 2  # the third shape uses the graph of the second, whose size varies


def test_the_verdict_is_of_the_inputs_and_shared_with_no_other_model():
    """A pass that is right for one model and wrong for another: each gets its own graph."""

    @dataclass(frozen=True)
    class DropBias:
        name = "drop_bias"

        def __call__(self, gm):
            count = 0
            for node in list(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
                count += 1
            return PassReport(self.name, count)

    class Shifted(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.shift = nn.Parameter(torch.full((64,), shift))

        def forward(self, x):
            return x.sin() + self.shift

    x = torch.randn(8, 64)
    for shift in (0.0, 3.0, 0.0, 2.0):
        torch._dynamo.reset()
        model = Shifted(shift)
        explanation = explain(model, x, options={"ledger": True, "extra_passes": [DropBias()]})
        assert rows(explanation, name="drop_bias")["1.joint", "drop_bias"].is_taken_back == (shift != 0)
        assert off(with_ledger(model, extra_passes=[DropBias()])(x), model(x)) < 1e-5


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64), dropout

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return x + self.out(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "level", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("conservative", "balanced")), "aggressive"]
)
def test_our_own_passes_are_within_their_bounds(level):
    explanation = explain(Attention(), torch.randn(2, 32, 64), options={"ledger": True, "level": level})
    found = rows(explanation)
    assert not any(errors.is_taken_back for errors in found.values())
    measured = [errors for (graph, _), errors in found.items() if graph == "1.joint"]
    assert all(errors.exact.gradients is not None or errors.reason == "the graph is unchanged" for errors in measured)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_result_that_is_a_view_of_an_input_widens_no_bound_and_narrows_none(is_training):
    """A large view would be most of the norm, and has no error. A program returns none."""
    torch.manual_seed(0)
    weight, large = torch.randn(16, 4), 30 * torch.randn(64, 16)

    def routed(x):
        return x.view(-1), (x @ weight).softmax(-1)

    with torch.set_grad_enabled(is_training):
        found = rows(explain(routed, large.requires_grad_(is_training), options={"ledger": True}), name="cast_bf16")
    (errors,) = [errors for errors in found.values() if errors.exact.results is not None]
    assert not errors.is_taken_back


def test_dropout_draws_the_same_mask_for_both_sides():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    x, state = torch.randn(16, 64), torch.get_rng_state()
    explanation = explain(model, x, options={"ledger": True, "extra_passes": [Scale()]})
    assert torch.equal(torch.get_rng_state(), state)
    found = rows(explanation)
    assert found["1.joint", "cast_bf16"].exact.results < 6e-3
    assert found["1.joint", "scale"].is_taken_back


def test_a_pass_that_draws_anew_is_said_to_be_not_compared():
    options = {"ledger": True, "extra_passes": [Scale()]}
    found = rows(explain(Attention(0.3), torch.randn(2, 32, 64), options=options))
    assert "it draws random numbers anew" in found["1.joint", "rewrite_attention"].reason
    assert found["1.joint", "cast_bf16"].exact.results < 6e-3
    assert found["1.joint", "scale"].is_taken_back


def test_mutated_inputs_of_the_user_are_not_touched():
    """The ledger runs copies: running statistics move once, by the call itself."""
    torch.manual_seed(0)
    model, eager = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    x = torch.randn(32, 8)
    compiled = with_ledger(model, precision="float32", extra_passes=[Scale(1.0)])
    for _ in range(2):
        torch.testing.assert_close(compiled(x), eager(x), rtol=1e-5, atol=1e-5)
    assert int(model.num_batches_tracked) == 2
    torch.testing.assert_close(model.running_mean, eager.running_mean)

    def update(cache, value):
        cache.add_(value)
        return cache * 2

    cache = torch.ones(4, 4)
    with_ledger(update, precision="float32")(cache, torch.ones(4, 4))
    assert torch.equal(cache, torch.full((4, 4), 2.0))


@dataclass(frozen=True)
class WriteInPlace:
    """Writes to an input of the graph, which no pass may do."""

    name = "write_in_place"

    def __call__(self, gm):
        first = gm.graph.find_nodes(op="placeholder")[0]
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            node = gm.graph.call_function(torch.ops.aten.mul_.Tensor, (first, 3.0))
        node.meta = dict(first.meta)
        return PassReport(self.name, 1)


def test_a_pass_that_writes_to_inputs_cannot_reach_the_users_tensors():
    x = torch.ones(4, 4)
    with contextlib.suppress(BackendCompilerFailed):  # the lowering may refuse such a graph
        with_ledger(lambda t: t * 2, extra_passes=[WriteInPlace()])(x)
    assert torch.equal(x, torch.ones(4, 4))


def test_integer_results_must_stay_if_no_rounding_reaches_them(caplog):
    @dataclass(frozen=True)
    class OneMore:
        name = "one_more"

        def __call__(self, gm):
            output, results = gm.graph.output_node(), list(gm.graph.output_node().args[0])
            with gm.graph.inserting_before(output):
                node = gm.graph.call_function(torch.ops.aten.add.Tensor, (results[0], 1))
            node.meta = dict(results[0].meta)
            output.args = ((node, *results[1:]),)
            return PassReport(self.name, 1)

    ids = torch.arange(8)
    assert torch.equal(with_ledger(lambda t: t * 2, extra_passes=[OneMore()])(ids), ids * 2)
    assert "a result computed from integers alone changed" in warnings_of(caplog)[0]


def test_buckets_pad_and_a_taken_back_pass_stays_away(caplog):
    model = Attention().eval()
    compiled = with_ledger(model, precision="float32", buckets="pow2", extra_passes=[Scale()])
    with torch.no_grad():
        for length in (20, 27, 30):
            x = torch.randn(2, length, 64)
            kp_dynamo.mark_sequence(x, 1)
            assert off(compiled(x), model(x)) < 1e-5
    assert len(warnings_of(caplog)) == 1


@pytest.mark.slow
def test_blocks_are_measured_with_the_values_of_their_first_run():
    model = nn.Sequential(*(Attention() for _ in range(4)))
    x = torch.randn(2, 32, 64)
    explanation = explain(model, x, options={"ledger": True, "blocks": "on"})
    assert any(len(d.pieces) for d in explanation.divisions)
    casts = rows(explanation, name="cast_bf16")
    assert casts
    assert all(errors.exact.results < errors.bound.results for errors in casts.values())


@pytest.mark.slow
def test_a_pass_of_the_user_sees_no_blocks_and_is_taken_back():
    model, x = nn.Sequential(*(Attention() for _ in range(4))), torch.randn(2, 32, 64)
    options = {"blocks": "auto", "extra_passes": [Scale()]}
    explanation = explain(model, x, options={"ledger": True, **options})
    assert not any(len(d.pieces) for d in explanation.divisions)
    assert all(errors.is_taken_back for errors in rows(explanation, name="scale").values())
    compiled = with_ledger(model, precision="float32", **options)
    assert off(compiled(x), model(x)) < 1e-5


@pytest.mark.quick("blocks")
@pytest.mark.parametrize("checkpoint", ["blocks", "attention", 0.5])
def test_checkpoint(checkpoint):
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(2, 32, 64)
    options = {"ledger": True, "checkpoint": checkpoint, "extra_passes": [Scale()]}
    found = rows(explain(model, x, options=options))
    (tagged,) = [e for (graph, name), e in found.items() if name.startswith("checkpoint_") and graph == "1.joint"]
    assert tagged.before.results in (0, None)
    assert [name for (_, name), errors in found.items() if errors.is_taken_back] == ["scale"]


def test_ahead_of_time_there_are_no_values():
    with pytest.raises(TPUConfigurationError, match="ledger=True is invalid for fake tensors, which have no values"):
        kp_dynamo.aot_compile(mlp(), (torch.randn(4, 64),), options={"ledger": True})


def test_a_graph_that_reads_bits_is_compared_without_float64():
    def reads_bits(x):
        return x.view(torch.int32) + 1, x * 2

    options = {"ledger": True, "precision": "float32", "extra_passes": [Scale()]}
    found = rows(explain(reads_bits, torch.randn(8, 8), options=options))
    (scale,) = [errors for (_, name), errors in found.items() if name == "scale"]
    assert scale.is_taken_back
    assert "in place of float64, aten.view.dtype reads the bits of a number" in scale.reason


def test_an_operator_of_the_user_in_float32_only(caplog):
    @torch.library.custom_op("ledger_test::only_float32", mutates_args=())
    def only_float32(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x * 2

    only_float32.register_fake(torch.empty_like)

    def model(x, w):
        return torch.ops.ledger_test.only_float32(x @ w)

    options = {"ledger": True, "extra_passes": [Scale()]}
    with torch.no_grad():
        found = rows(explain(model, torch.randn(16, 64), torch.randn(64, 64), options=options))
    scale = next(errors for (_, name), errors in found.items() if name == "scale")
    assert "in place of float64, only_float32" in scale.reason


def test_equal_programs_differ_by_what_was_taken_back():
    """A graph without a pass is another graph: it shares no program with the one that has it."""
    model, x = mlp(), torch.randn(16, 64)
    wrong, right = ({"ledger": True, "precision": "float32", "extra_passes": [Scale(f)]} for f in (1.01, 1.0))
    first = explain(model, x, options=wrong)
    second = explain(model, x, options=right)
    assert {g.key for g in first.graphs}.isdisjoint(g.key for g in second.graphs)
    assert all(capture.key == "" for capture in first.captures)
