"""The page of plan: the way to take in words, what is uncertain about it, what it was compared with."""

from __future__ import annotations

import re
from dataclasses import replace

from kp_dynamo.planner.result import Plan, PlanRow
from tests.page.test_render import BAD, check

FIRST = PlanRow(
    kind="compiled",
    target="v5e",
    topology="4x4",
    num_chips=16,
    num_hosts=2,
    mesh={"data": 16},
    sharding="fsdp",
    batch=64,
    accumulate=2,
    step_samples=128,
    step_tokens=128 * 2048,
    checkpoint="blocks",
    memory_bytes=9 * 10**9,
    budget_bytes=14.4e9,
    memory_parts={
        "parameters": 2 * 10**9,
        "optimizer": 4 * 10**9,
        "gradients": 10**9,
        "activations": 10**9,
        "inputs": 9,
    },
    step_ms=2500.0,
    time_parts_ms={
        "matmuls": 1200.0,
        "traffic": 900.0,
        "gathers": 400.0,
        "gradient_sums": 200.0,
        "result_sums": 100.0,
        "optimizer": 40.0,
    },
    mfu=0.41,
    usd_per_million=0.0512,
    hours=900.0,
    usd=17280.0,
    why="the winner",
)
ONE_HOST = replace(
    FIRST,
    kind="bound",
    topology="2x4",
    num_chips=8,
    num_hosts=1,
    mesh={"data": 8},
    mfu=0.62,
    why="at least 1.10x the cost of the first, mostly by its matmuls",
)
BETTER = replace(ONE_HOST, why="not compiled: its cost is at least 0.80x that of the first, so it may be better")
FAILED = replace(ONE_HOST, kind="failed", why="does not fit: 15.20 GB a chip, compiled")
PLAN = Plan(
    rows=(FIRST, ONE_HOST, BETTER, FAILED),
    one_host=ONE_HOST,
    train=True,
    objective="cost",
    targets=("v5e",),
    max_chips=16,
    num_searched=1234,
    num_without_memory=1000,
    num_too_late=3,
    deadline_hours=1000.0,
    tokens=1e12,
    left_out={f"tensor on {BAD}": f"it has no plan, {BAD}"},
    options={"level": "aggressive", "keep_float32": [BAD]},
    seconds={"capture": 12.0, "bounds": 0.5, "compile": 340.0},
)
BOUNDS = replace(
    PLAN,
    rows=(replace(ONE_HOST, hours=None, usd=None, why="the best bound; nothing was compiled that fits"),),
    left_out={},
    options={},
    train=False,
    deadline_hours=None,
)
PLANS = {"slices": PLAN, "bounds": BOUNDS}


def headline(plan: Plan) -> str:
    return re.search("<h1>(.*?)</h1>", plan.to_html())[1]


def test_the_headline_says_what_to_take_and_what_it_costs():
    assert headline(PLAN) == (
        "The cheapest compiled way of training is on 16 chips of v5e (4x4), fsdp on data=16, 128 samples a step: 2.5 s "
        "a step, 41% of the peak; 8.4 of 13.4 GiB a chip; USD 51.20 a billion tokens. The whole training of 1 "
        "trillion tokens takes 37.5 days and USD 17,280."
    )


def test_bounds_are_said_to_be_bounds():
    assert headline(BOUNDS) == (
        "Inference is cheapest on 8 chips of v5e (2x4), fsdp on data=8, 128 samples a step: at least 2.5 s a step, at "
        "most 62% of the peak; at least 8.4 of 13.4 GiB a chip; at least USD 51.20 a billion tokens."
    )
    page = BOUNDS.to_html()
    assert "No way was compiled: whether this one fits is unknown." in page
    assert "Memory, time and price are lower bounds." in page


def test_what_is_uncertain_is_named_first():
    page = PLAN.to_html()
    problems = page[page.index('id="problems"') : page.index('id="ways"')]
    for told in (
        "The first way needs 2 hosts: planned, not runnable by this version.",
        "the best way on one host, 8 chips of v5e (2x4): at least 2.5 s a step",
        "1 way did not fit or did not compile.",
        "4: does not fit: 15.20 GB a chip, compiled",
        "1 way may be better: 3.",
    ):
        assert told in problems


def test_every_way_has_a_row_with_its_reason_and_a_bar_in_both_pictures():
    page = PLAN.to_html()
    for number, row in enumerate(PLAN.rows, 1):
        assert f"{number}: {row.num_chips} v5e {row.topology}" in page
        assert row.why in page
        assert page.count(f"{number}: {row.num_chips} v5e</text>") == 2


def rows_of(page: str, name: str) -> str:
    """The picture of a section."""
    found = page[page.index(f'<section id="{name}">') :]
    return found[found.index("<svg") : found.index("</svg>")]


def test_parts_that_may_overlap_each_begin_at_zero():
    one = replace(PLAN, rows=(FIRST,), one_host=FIRST)
    for name, num_parts in (("times", 6), ("memory", 5)):
        bars = re.findall(r'<path d="M ([\d.]+) ([\d.]+) L ([\d.]+)[^"]*" clip-path', rows_of(one.to_html(), name))
        assert len(bars) == num_parts
        assert len({left for left, _, _ in bars}) == 1
        assert len({top for _, top, _ in bars}) == num_parts
    page = PLAN.to_html()
    assert "Parts are not added up: all but the optimizer may overlap" in page
    assert "Parts are not added up: gradients and activations" in page


def test_what_limits_a_step_is_said_below_the_headline():
    lead = (
        "Of what a step takes at least, the matmuls take longest: 1.2 s; traffic 900 ms, gathers 400 ms, "
        "gradient sums 200 ms, result sums 100 ms, optimizer 40 ms."
    )
    assert f'<p class="lead">{lead}</p>' in PLAN.to_html()


def test_the_code_is_open_and_names_are_escaped():
    page = PLAN.to_html()
    assert '<details class="fold" open><summary>the lines that run it</summary>' in page
    assert "kp_dynamo.shard(model, mesh, &#39;fsdp&#39;)" in page
    for plan in PLANS.values():
        check(plan.to_html())


def test_a_notebook_shows_it_in_a_frame():
    assert PLAN._repr_html_().startswith('<iframe sandbox=""')
