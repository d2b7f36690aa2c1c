"""Padding to buckets from the option to the results: programs counted, refusals said, nothing recompiled by Dynamo."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kp_dynamo import mark_sequence
from kp_dynamo.exceptions import TPUValidationError
from kp_dynamo.graph.editing import insert_call, replace_node
from kp_dynamo.passes.base import PassReport
from kp_dynamo.telemetry import snapshot
from tests.spine import assert_same, compiled, counted, on

BUCKETS = [8, 16]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setenv("KP_TPU_POISON", "1")
    monkeypatch.setattr("kp_dynamo.telemetry.warn_once._logged", set())  # an earlier test may have warned the same
    torch._dynamo.reset()


def rows(length, *, trains=False):
    torch.manual_seed(length)
    return mark_sequence(torch.randn(3, length, 4, requires_grad=trains), 1)


def softmax(x):
    return x.softmax(1) * 2


def captures():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_one_program_serves_a_bucket_and_dynamo_captures_once():
    run, before = compiled(softmax, buckets=BUCKETS), captures()
    with counted() as counts:
        for length in (5, 2, 3, 8, 7, 9, 16, 11):
            assert_same(run(rows(length)), softmax(rows(length)))
    assert counts.programs == 2
    assert captures() - before == 1


def test_forty_lengths_stay_below_the_limit_of_recompilations():
    run = compiled(softmax, buckets="pow2")
    with counted() as counts, torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in range(2, 42):
            run(rows(length))
    assert counts.programs == 6  # 2, 4, 8, 16, 32, 64


def test_on_xla_tensors_nothing_is_compiled_for_a_length():
    """Padding and cutting on the device would be a program for each length."""
    import torch_xla.debug.metrics as metrics

    run = compiled(softmax, buckets=BUCKETS)
    compiles = []
    for length in (5, 7, 3, 6):
        x = mark_sequence(on("xla", rows(length)), 1)
        result = run(x)
        assert result.device.type == "xla"
        assert_same(result.cpu(), softmax(rows(length)))
        compiles.append(metrics.counter_value("UncachedCompile"))
    assert compiles[0] == compiles[-1]


def test_training_on_both_devices():
    for device in ("cpu", "xla"):
        torch._dynamo.reset()
        run = compiled(lambda x, w: (x @ w).softmax(1).square().mean(), buckets=BUCKETS)
        for length in (5, 11, 7):
            x, w = rows(length, trains=True), torch.eye(4, requires_grad=True)
            (x @ w).softmax(1).square().mean().backward()
            mine, weight = (t.detach().to(device).requires_grad_() for t in (x, w))
            run(mark_sequence(mine, 1), weight).backward()
            assert_same((mine.grad.cpu(), weight.grad.cpu()), (x.grad, w.grad))


def test_batch_and_length_vary_together():
    run = compiled(lambda x: x.mean((0, 1)), buckets=[4, 8])
    with counted() as counts:
        for batch, length in ((3, 5), (2, 3), (4, 8), (5, 7), (6, 2)):
            x = mark_sequence(mark_sequence(torch.randn(batch, length, 4), 0), 1)
            assert_same(run(x), x.mean((0, 1)))
    assert counts.programs == 4  # 4x8, 4x4, 8x8, 8x4


def test_a_length_of_one_is_a_graph_of_its_own():
    run = compiled(softmax, buckets=BUCKETS)
    for length in (5, 1, 7, 1):
        assert_same(run(rows(length)), softmax(rows(length)))


def test_a_length_of_zero():
    run = compiled(lambda x: x.sum(1), buckets=BUCKETS)
    for length in (5, 0, 7):
        assert_same(run(rows(length)), rows(length).sum(1))


def test_a_length_over_the_last_bucket():
    run = compiled(softmax, buckets=BUCKETS)
    assert_same(run(rows(40)), softmax(rows(40)))
    refuses = compiled(softmax, buckets=BUCKETS, over_bucket="error")
    refuses(rows(5))
    with pytest.raises(TPUValidationError, match="a length of 40 is over the last bucket, 16"):
        refuses(rows(40))
    assert_same(refuses(rows(9)), softmax(rows(9)))


def test_a_range_of_buckets():
    run = compiled(softmax, buckets={"min": 4, "max": 12, "step": 4})
    with counted() as counts:
        for length in (3, 4, 6, 8, 10, 12):
            run(rows(length))
    assert counts.programs == 3


def test_a_bucket_never_exceeds_what_the_model_takes():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.randn(12, 4))

        def forward(self, x):
            return x + self.places[: x.shape[1]]

    model = Positions()
    run = compiled(model, buckets=BUCKETS)
    for length in (5, 11, 12, 9):
        assert_same(run(rows(length)), model(rows(length)))


def test_a_branch_on_the_length_is_taken_by_the_true_one():
    def halves(x):
        return x.sum(1) if x.shape[1] < 6 else x.sum(1) * 100

    run = compiled(halves, buckets=BUCKETS)
    for length in (5, 3, 7, 4, 12):
        assert_same(run(rows(length)), halves(rows(length)))


def test_a_size_that_the_model_fixes_is_said(caplog):
    def of_five(x):
        return x.sum(1) if x.shape[1] == 5 else x.mean(1)

    run = compiled(of_five, buckets=BUCKETS)
    with caplog.at_level(logging.WARNING, "kp_dynamo"):
        for length in (5, 7, 6):
            assert_same(run(rows(length)), of_five(rows(length)))
    (warning,) = [r.getMessage() for r in caplog.records if "fixes it" in r.getMessage()]
    assert warning.startswith("dimension 1 of input 0 was marked as varying, but the model fixes it at 5")


def test_sizes_among_the_results_are_true_ones():
    run = compiled(lambda x: (x * 2, x.shape[1] * 3), buckets=BUCKETS)
    for length in (5, 7, 11):
        assert run(rows(length))[1] == 3 * length


def test_results_are_dense():
    run = compiled(lambda x: (x * 2).transpose(1, 2), buckets=BUCKETS)
    for length in (5, 7):
        assert run(rows(length)).stride() == (rows(length) * 2).transpose(1, 2).stride()


def test_an_operator_without_a_rule_is_compiled_for_each_length(caplog):
    def largest(x):
        return F.adaptive_max_pool1d(x.mT, 1).sum(2)

    run = compiled(largest, buckets=BUCKETS)
    before = snapshot()["bucket_refusals"]
    with caplog.at_level(logging.WARNING, "kp_dynamo"), counted() as counts:
        for length in (5, 7):
            assert_same(run(rows(length)), largest(rows(length)))
    assert snapshot()["bucket_refusals"] == before + 1
    assert counts.programs == 2
    (warning,) = [r.getMessage() for r in caplog.records if "padded to buckets" in r.getMessage()]
    assert "aten.adaptive_max_pool2d.default (at " in warning
    assert "test_bucketing.py" in warning
    assert "no rule supports this operator along a padded dimension" in warning


def test_lengths_are_not_padded_without_the_pass_that_masks_them(caplog):
    def mean(x):
        return x.mean(1)

    run = compiled(mean, buckets=BUCKETS, disable_passes=["mask_padding"])
    with caplog.at_level(logging.WARNING, "kp_dynamo"):
        for length in (5, 7):
            assert_same(run(rows(length)), mean(rows(length)))
    assert "disable_passes names mask_padding, without which padding would change results" in caplog.text
    with pytest.raises(Exception, match=r"strict=True and the graph cannot be padded .* disable_passes names"):
        compiled(mean, buckets=BUCKETS, disable_passes=["mask_padding"], strict=True)(rows(5))


@dataclass(frozen=True)
class PoolsByReduction:
    """A pass of the user that replaces what padding was refused for."""

    name: str = "pools_by_reduction"

    def __call__(self, gm):
        pools = [n for n in gm.graph.nodes if n.target is torch.ops.aten.adaptive_max_pool2d.default]
        for pool in pools:
            (largest,) = pool.users
            with gm.graph.inserting_before(largest):
                made = insert_call(gm.graph, torch.ops.aten.amax.default, (pool.args[0], [-1], True), {}, like=largest)
            replace_node(largest, made)
        return PassReport(self.name, len(pools))


def test_a_refusal_names_an_operator_that_a_later_pass_replaced():
    run = compiled(lambda x: F.adaptive_max_pool1d(x.mT, 1).sum(2), buckets=BUCKETS, extra_passes=[PoolsByReduction()])
    for length in (5, 7):
        assert_same(run(rows(length)), rows(length).amax(1))


def test_strict_refuses_what_cannot_be_padded():
    with pytest.raises(Exception, match=r"mask_padding refused .*no rule supports this operator"):
        compiled(lambda x: F.adaptive_max_pool1d(x.mT, 1), buckets=BUCKETS, strict=True)(rows(5))


def test_an_input_that_is_expanded():
    """Its strides say that all its elements are one, which they are not once it is padded."""

    def times(x, scale):
        return x.sum(2).reshape(-1) * scale

    run = compiled(times, buckets=BUCKETS)
    for length in (5, 7):
        scale = torch.tensor(2.0).expand(3 * length)
        assert_same(run(rows(length), mark_sequence(scale, 0)), times(rows(length), scale))


def test_a_size_that_shrinks_as_the_length_grows_is_compiled_as_it_is(caplog):
    def rest(x, table):
        return table[x.shape[1] :].sum(0) * x

    run, before, table = compiled(rest, buckets=BUCKETS), snapshot()["exact_lengths"], torch.randn(20, 4)
    with caplog.at_level(logging.WARNING, "kp_dynamo"):
        for length in (5, 7, 11):
            assert_same(run(rows(length), table), rest(rows(length), table))
    assert snapshot()["exact_lengths"] > before
    assert "a tensor of size 20 - size 1 of input" in caplog.text
    assert "would be too short" in caplog.text


def test_what_raises_while_a_graph_is_padded_is_a_refusal(caplog):
    def fails(x):
        return F.hardtanh(x, -1 / x.shape[1], 1 / x.shape[1])

    run = compiled(fails, buckets=BUCKETS)
    with caplog.at_level(logging.WARNING, "kp_dynamo"):
        for length in (5, 7):
            assert_same(run(rows(length)), fails(rows(length)))
    assert "tracing at padded sizes failed" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mask_padding refused"):
        compiled(fails, buckets=BUCKETS, strict=True)(rows(5))


def test_sizes_and_comparisons_among_results():
    def measured(x):
        return x * 2, x.shape[1] / 2, x.shape[1] > 6, x.shape[1] * 3

    run = compiled(measured, buckets=BUCKETS)
    for length in (5, 7, 11):
        assert_same(run(rows(length)), measured(rows(length)))


def test_without_dynamic_sizes_buckets_change_nothing():
    run = compiled(softmax, buckets=BUCKETS, dynamic=False)
    assert_same(run(torch.ones(3, 5, 4)), softmax(torch.ones(3, 5, 4)))


def test_dynamic_true_pads_every_size():
    run = compiled(softmax, buckets=BUCKETS, dynamic=True)
    with counted() as counts:
        for batch, length in ((3, 5), (5, 6), (7, 7)):
            x = torch.randn(batch, length, 4)
            assert_same(run(x), softmax(x))
    assert counts.programs == 1


def test_dropout_is_drawn_and_gradients_follow_its_mask():
    drop = nn.Dropout(0.5)
    run = compiled(lambda x: drop(x), buckets=BUCKETS)
    x = rows(7, trains=True)
    y = run(x)
    y.sum().backward()
    assert_same(x.grad, (y != 0).float() * 2)


def test_a_decode_step_over_a_growing_cache():
    def step(query, keys):
        return torch.softmax(query @ keys.mT, -1) @ keys

    run = compiled(step, buckets=BUCKETS)
    with counted() as counts:
        for length in range(2, 15):
            keys = mark_sequence(torch.randn(2, length, 4), 1)
            query = torch.randn(2, 1, 4)
            assert_same(run(query, keys), step(query, keys))
    assert counts.programs == 2


@pytest.mark.parametrize(
    ("what", "dim", "says"),
    [
        (torch.ones(2, 3), 2, "dim=2 is invalid: not a dimension of a tensor of shape"),
        (torch.ones(2, 3), -3, "Allowed: -2 to 1"),
        (torch.ones(2, 3), 1.0, "dim=1.0"),
        ([1, 2], 0, "not a list"),
    ],
)
def test_marks_on_a_missing_dimension(what, dim, says):
    with pytest.raises(TPUValidationError, match=says):
        mark_sequence(what, dim)


@pytest.mark.parametrize(
    "buckets", [[], [16, 8], [8, 8], [0, 8], [8.5], "pow3", {"min": 8}, {"min": 9, "max": 8, "step": 1}]
)
def test_buckets_that_are_none(buckets):
    with pytest.raises(Exception, match="option buckets="):
        compiled(softmax, buckets=buckets)(rows(5))


def scores(x, w):
    q = F.linear(x, w).view(2, -1, 4, 4).transpose(1, 2)
    return (q @ q.transpose(-1, -2)).softmax(-1)


def test_lengths_that_break_a_guard_are_reported(caplog):
    """With dynamic=True the width varies as well: its bucket, 20, is no 4 heads of 4."""
    run, w = compiled(scores, dynamic=True, buckets=[20, 40]), torch.randn(16, 16)
    before = snapshot()["exact_lengths"]
    with caplog.at_level(logging.WARNING, "kp_dynamo"):
        for length in (5, 33, 7):
            x = torch.randn(2, length, 16)
            assert_same(run(x, w), scores(x, w))
    assert snapshot()["exact_lengths"] > before
    assert "cannot be padded to" in caplog.text
    assert "Where your code branches on that size, use it as a number" in caplog.text
    assert "mark the sizes that do with kp_dynamo.mark_sequence" in caplog.text


def test_lengths_that_break_a_guard_are_an_error_under_strict():
    run = compiled(scores, dynamic=True, buckets=[20, 40], strict=True)
    with pytest.raises(Exception, match=r"strict=True and sizes .* cannot be padded to"):
        run(torch.randn(2, 5, 16), torch.randn(16, 16))


@pytest.mark.quick("<lambda>0", "<lambda>2")
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.repeat(1, 2, 1),
        lambda x: torch.stack([x, x * 2], 1).flatten(1, 2),
        lambda x: (x[:, :, None, :1] * x[:, None, :, :1]).flatten(1, 2),
    ],
)
def test_results_lie_in_memory_as_in_eager(fn):
    for length in (3, 5, 8):
        assert compiled(fn, buckets=[8])(rows(length)).stride() == fn(rows(length)).stride()


def decode(x, cache, start):
    cache[:, start : start + x.shape[1]] = x
    return cache.sum(1)


def decode_by_scatter(x, cache, start):
    places = (start + torch.arange(x.shape[1]))[None, :, None].expand_as(x)
    cache.scatter_(1, places, x)
    return cache.sum(1)


def decode_by_mask(x, cache, start):
    length, places = x.shape[1], torch.arange(cache.shape[1])
    is_new = ((places >= start) & (places < start + length))[None, :, None]
    new = x.index_select(1, (places - start).clamp(0, length - 1))
    cache.copy_(torch.where(is_new, new, cache))
    return cache.sum(1)


def prefill(x, cache, start):
    cache[:, : x.shape[1]] = x
    return cache.sum(1)


def test_a_number_that_varies_is_named_as_the_user_does(caplog, monkeypatch):
    monkeypatch.setattr("kp_dynamo.telemetry.warn_once._logged", set())  # a reason is warned about once per process
    run = compiled(decode, buckets=BUCKETS)
    # torch_xla sets it to False where a test imports it first.
    varies = torch._dynamo.config.patch(automatic_dynamic_shapes=True)
    with varies, caplog.at_level(logging.WARNING, "kp_dynamo"):
        for length, start in ((5, 0), (6, 5), (7, 11)):
            cache, expected = torch.zeros(3, 32, 4), torch.zeros(3, 32, 4)
            assert_same((run(rows(length), cache, start), cache), (decode(rows(length), expected, start), expected))
    (warning,) = [r.getMessage() for r in caplog.records if "padded to buckets" in r.getMessage()]
    assert (
        "not padded to buckets: the number start varies and is not a padded size. Try: pass it as a tensor" in warning
    )


@pytest.mark.parametrize("fn", [decode_by_scatter, decode_by_mask, prefill])
def test_caches_are_written_at_padded_sizes(fn):
    run = compiled(fn, buckets=BUCKETS, strict=True)
    with counted() as counts:
        for length, place in ((5, 0), (6, 5), (7, 11)):
            start, cache, expected = torch.tensor([place]), torch.zeros(3, 32, 4), torch.zeros(3, 32, 4)
            assert_same((run(rows(length), cache, start), cache), (fn(rows(length), expected, start), expected))
    assert counts.programs == 1


@pytest.mark.parametrize(
    ("fn", "remedy"),
    [
        (lambda x: ((y := x * 2), y[:, 1:]), "is padded. Return a copy: add .clone() to one of them"),
        (
            lambda x: torch.zeros(3, 32, 4).index_copy(1, torch.arange(x.shape[1]), x),
            "through an index that has a tail is unsupported. Allowed: x.scatter(dim, index, value)",
        ),
    ],
)
def test_a_refusal_says_what_to_do(fn, remedy):
    with pytest.raises(Exception, match=re.escape(remedy)):
        compiled(fn, buckets=BUCKETS, strict=True)(rows(5))


def test_a_copy_of_a_shared_result_is_padded():
    run = compiled(lambda x: ((y := x * 2), y[:, 1:].clone()), buckets=BUCKETS, strict=True)
    for length in (5, 7):
        assert_same(run(rows(length)), ((y := rows(length) * 2), y[:, 1:].clone()))


def test_a_second_backward_is_refused_and_not_left_out():
    """The gradient of a penalty on gradients was lost: those had no graph."""
    x = rows(5, trains=True)
    (gradient,) = torch.autograd.grad(compiled(softmax, buckets=BUCKETS)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("buckets", [BUCKETS, None], ids=["buckets", "exact"])
def test_the_larger_of_two_sizes(buckets):
    def fn(x, y):
        return x.new_ones(max(x.shape[0], y.shape[0])) * x.sum()

    run = compiled(fn, dynamic=True, **({"buckets": buckets} if buckets else {}))
    for first, second in ((3, 5), (6, 2)):
        assert_same(run(torch.ones(first), torch.ones(second)), fn(torch.ones(first), torch.ones(second)))


def rotated(x):
    """Rotary embedding in complex numbers."""
    angles = torch.outer(torch.arange(x.shape[1]).float(), torch.tensor([1.0, 0.01]))
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(2)


def test_complex_numbers_are_padded():
    run = compiled(rotated, buckets=BUCKETS, strict=False)
    with counted() as counts:
        for length in (5, 7):
            mine, eager = rows(length, trains=True), rows(length, trains=True)
            run(mine).square().sum().backward()
            rotated(eager).square().sum().backward()
            assert_same((run(mine).detach(), mine.grad), (rotated(eager).detach(), eager.grad))
    assert counts.graphs == 2


def complex_variance(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2))).var((0, 1))


def complex_deviation(x):
    return torch.view_as_complex(x.unflatten(-1, (-1, 2))).std((0, 2), correction=0).sum()


@pytest.mark.parametrize(("fn", "trains"), [(complex_variance, False), (complex_deviation, True)])
def test_the_variance_of_complex_numbers_is_real(fn, trains):
    run = compiled(fn, buckets=BUCKETS)
    for length in (5, 7):
        mine, eager = rows(length, trains=trains), rows(length, trains=trains)
        found, expected = run(mine), fn(eager)
        assert_same(found, expected)
        if trains:
            found.backward()
            expected.backward()
            assert_same(mine.grad, eager.grad)


def attended(x):
    """The strides of a dropout's result are recomputed, and then those of the matmul that reads it."""
    heads = x.view(x.shape[0], x.shape[1], 2, 2).transpose(1, 2)
    weights = F.dropout((heads @ heads.mT).softmax(-1), 0.1, training=False)
    return (weights @ heads).transpose(1, 2).reshape(x.shape)


def test_lengths_stay_symbolic_where_strides_are_recomputed():
    run = compiled(attended, buckets=BUCKETS)
    with counted() as counts:
        for length in (5, 7, 6):
            assert_same(run(rows(length)), attended(rows(length)))
    assert counts.programs == 1
