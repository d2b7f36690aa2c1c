"""The graph that `mask_padding` makes; what comes of it is tested in tests/buckets/."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import expecttest
import torch
import torch.nn.functional as F
from torch import fx

from kp_dynamo import mark_sequence
from kp_dynamo.passes.base import PassReport
from kp_dynamo.passes.mask_padding import MaskPadding
from kp_dynamo.passes.padding.rules import RULES
from kp_dynamo.telemetry import snapshot
from tests.graphs import graph_text
from tests.spine import compiled

aten = torch.ops.aten


@dataclass(frozen=True)
class Recorded:
    """Keeps the graphs that it is given."""

    name: str = "recorded"
    graphs: ClassVar[list[fx.GraphModule]] = []

    def __call__(self, gm: fx.GraphModule) -> PassReport:
        self.graphs.append(gm)
        return PassReport(self.name, 0)


def masked(fn, *args, **options):
    """The graph of `fn` behind the pass."""
    torch._dynamo.reset()
    Recorded.graphs.clear()
    with torch.no_grad():
        compiled(fn, buckets=[8], extra_passes=[Recorded()], disable_passes=["fold_constants"], **options)(*args)
    return Recorded.graphs[-1]


def rows(length=5):
    return mark_sequence(torch.randn(3, length, 4), 1)


def test_softmax_over_the_length():
    expecttest.assert_expected_inline(
        graph_text(masked(lambda x: x.softmax(1), rows())),
        """\
arg0_1 = input
arg1_1: f32[3, s27, 4] = input
arg2_1: i64[] = input
arange: i64[s27] = aten.arange.default(arg0_1, device=cpu, pin_memory=False)
lt: b8[s27] = aten.lt.Tensor(arange, arg2_1)
view: b8[1, s27, 1] = aten.view.default(lt, [1, -1, 1])
full: f32[] = aten.full.default([], -inf, dtype=torch.float32, device=cpu, pin_memory=False)
where: f32[3, s27, 4] = aten.where.self(view, arg1_1, full)
_softmax: f32[3, s27, 4] = aten._softmax.default(where, 1, False)
return [_softmax]""",
    )


def test_what_acts_on_elements_alone_stays_as_it_is():
    before = snapshot()["passes"]
    gm = masked(lambda x: (x * 2).relu() + 1, rows())
    assert [str(n.target) for n in gm.graph.nodes if n.op == "call_function"] == [
        "aten.mul.Tensor",
        "aten.relu.default",
        "aten.add.Tensor",
    ]
    report = next(p for p in snapshot()["passes"][len(before) :] if p["name"] == "mask_padding")
    assert report["notes"] == ["0 tails masked"]


def test_values_are_true_behind_a_pass_of_the_users_and_a_second_run_changes_nothing():
    gm = masked(lambda x: (x @ x.mT).softmax(-1).sum(1) / x.shape[1], rows())
    gm.graph.lint()
    before = graph_text(gm)
    (symbol,) = {str(s) for n in gm.graph.nodes if n.op == "placeholder" for s in symbols_of(n)}
    assert MaskPadding((symbol,))(gm).rewritten == 0
    assert graph_text(gm) == before


def symbols_of(node):
    sizes = node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else [node.meta["val"]]
    return {s for size in sizes if isinstance(size, torch.SymInt) for s in size.node.expr.free_symbols}


def test_a_mask_is_made_once():
    gm = masked(lambda x: x.softmax(1) + x.amax(1, keepdim=True) + x.sum(1, keepdim=True), rows())
    targets = [str(n.target) for n in gm.graph.nodes]
    assert sum("arange" in t for t in targets) == 1
    assert sum("aten.where" in t for t in targets) == 3


def test_a_rule_that_declares_no_layouts_gets_canonical_operands(monkeypatch):
    seen = []

    def checked(rule):
        def function(call):
            seen.append(call.target)
            assert all(len(atoms) <= 1 for x in call.operands() for atoms in x.dims), call.target
            return rule.function(call)

        return replace(rule, function=function)

    for target, rule in RULES.items():
        if rule.layouts is None:
            monkeypatch.setitem(RULES, target, checked(rule))
    gm = masked(lambda x: (x.reshape(-1, 4) @ x.reshape(-1, 4).mT).tril().diagonal()[torch.arange(3)], rows())
    assert seen == [aten.tril.default, aten.diagonal.default]
    assert [n for n in gm.graph.nodes if n.target is aten.index_select.default]


def test_operands_of_one_layout_are_not_moved():
    """Linear layers of merged batches, and the loss of their tokens."""
    gm = masked(lambda x, w, t: F.cross_entropy((x.reshape(-1, 4) @ w).relu(), t.flatten()), *merged())
    assert not [n for n in gm.graph.nodes if n.target is aten.index_select.default]


def merged():
    return rows(), torch.ones(4, 4), mark_sequence(torch.zeros(3, 5, dtype=torch.int64), 1)


def test_a_refused_graph_is_left_as_it_was():
    gm = masked(lambda x: F.adaptive_max_pool1d(x.mT, 1), rows())
    assert not [n for n in gm.graph.nodes if "where" in str(n.target)]


def test_a_number_that_varies_and_is_no_size_is_refused():
    torch._dynamo.reset()
    before = snapshot()["bucket_refusals"]
    run = compiled(lambda x, n: x[:, :2] * n, buckets=[8], dynamic=True)
    for n in (3, 4):
        x = torch.randn(3, 5, 4)
        torch.testing.assert_close(run(x, n), x[:, :2] * n)
    assert snapshot()["bucket_refusals"] == before + 1


def test_a_batch_that_is_shared_among_devices_is_padded():
    share = compiled(lambda x: torch.ops.kp.shard_batch(x, [1]).sum(0), buckets=[8], strict=True)
    assert torch.equal(share(mark_sequence(torch.ones(5, 4), 0)), torch.full((4,), 5.0))
