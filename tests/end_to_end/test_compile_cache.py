"""The compile cache through torch.compile: what is shared, what never is, what is dropped, and that it is told."""

import contextlib
import gc
import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kp_dynamo import cache_stats, clear_cache
from kp_dynamo.session import SESSION
from tests.spine import DEVICES, assert_same, compiled, counted, on

SQUARE = torch.tensor([[1.0, -2.0], [3.0, 5.0]])


@pytest.fixture(autouse=True)
def _empty_cache():
    clear_cache()
    yield
    SESSION.resize(100)


def fresh(fn, **options):
    """`fn` compiled by a Dynamo that has forgotten it, so that the backend is asked again."""
    torch._dynamo.reset()
    return compiled(fn, **options)


@pytest.mark.quick("inference-xla", "training-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_training", [False, True], ids=["inference", "training"])
def test_an_equal_model_is_found_before_autograd_traces_it(device, is_training):
    def run_once():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
        with contextlib.nullcontext() if is_training else torch.no_grad():
            y = fresh(model)(torch.ones(5, 3, device=device))
        torch.testing.assert_close(y, model(torch.ones(5, 3, device=device)))
        if is_training:
            y.sum().backward()

    with counted() as first:
        run_once()
    assert (first.aot_traces, first.programs) == (1, 2 if is_training else 1)
    with counted() as second:
        run_once()
    assert (second.aot_traces, second.graphs, second.programs, second.capture_hits) == (0, 0, 0, 1)


PAIRS = {
    "x+1, x+2": (lambda x, y: x + 1, lambda x, y: x + 2),
    "softmax(0), softmax(1)": (lambda x, y: x.softmax(0), lambda x, y: x.softmax(1)),
    "x-y, y-x": (lambda x, y: x - y, lambda x, y: y - x),
    "0.0, -0.0": (lambda x, y: torch.full_like(x, 0.0), lambda x, y: torch.full_like(x, -0.0)),
    "1, True": (
        lambda x, y: torch.full((2,), 1, device=x.device),
        lambda x, y: torch.full((2,), True, device=x.device),
    ),
    "nan, inf": (lambda x, y: x * float("nan"), lambda x, y: x * float("inf")),
    "x[0], x[1]": (lambda x, y: x[0] * 1, lambda x, y: x[1] * 1),
    "keyword": (lambda x, y: F.gelu(x), lambda x, y: F.gelu(x, approximate="tanh")),
    "dtype": (lambda x, y: x.to(torch.float64), lambda x, y: x.to(torch.float16)),
    "order": (lambda x, y: (x, y, x + y), lambda x, y: (y, x, x + y)),
    "update": (lambda x, y: (x.add_(1), x + y), lambda x, y: (y.add_(1), x + y)),
    "constant": (lambda x, y: x + torch.tensor([1.0, 2.0]).to(x), lambda x, y: x + torch.tensor([2.0, 1.0]).to(x)),
    "list": (lambda x, y: x[[0, 1]], lambda x, y: x[[1, 0]]),
    "edges": (lambda x, y: x.sin() * y.sin(), lambda x, y: x.sin() * x.sin()),
    "nested": (lambda x, y: torch.cat([x, y]), lambda x, y: torch.cat([y, x])),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_graphs_that_differ_in_one_thing_are_not_confused(pair):
    for device in DEVICES:
        for fn in (*pair, *reversed(pair)):
            mine, eager = on(device, (SQUARE, SQUARE + 1)), on("cpu", (SQUARE, SQUARE + 1))
            result, expected = fresh(fn)(*mine), fn(*eager)
            assert_same((result, mine), (expected, eager))
            for got, wanted in zip(_tensors(result), _tensors(expected), strict=True):
                assert torch.equal(got.cpu().signbit(), wanted.signbit())


def _tensors(tree):
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


MODES = {
    "plain": (contextlib.nullcontext, False),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), False),
    "no_grad": (torch.no_grad, True),
    "inference_mode": (torch.inference_mode, True),
    "requires_grad": (contextlib.nullcontext, True),
}


@pytest.mark.parametrize("order", [1, -1], ids=["forth", "back"])
def test_one_linear_in_five_modes_is_right_in_each(order):
    hits = {}
    for name, (mode, requires_grad) in list(MODES.items())[::order]:
        w = SQUARE.clone().requires_grad_(requires_grad)
        with mode(), counted() as counts:
            mine, eager = fresh(F.linear)(SQUARE, w), F.linear(SQUARE, w)
        assert (mine.dtype, mine.requires_grad, mine.is_inference()) == (
            eager.dtype,
            eager.requires_grad,
            eager.is_inference(),
        )
        torch.testing.assert_close(mine, eager)
        hits[name] = counts.capture_hits
    # Dynamo compiles under no_grad what it compiles under inference_mode; nothing else may be shared.
    assert {name for name, count in hits.items() if count} <= {"no_grad", "inference_mode"}


KINDS = {
    "apart": lambda base: (base[:2].clone(), base[2:].clone()),
    "one tensor": lambda base: (lambda t: (t, t))(base[:2].clone()),
    "halves": lambda base: (base[:2], base[2:]),
}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_duplicates_and_views_among_inputs_are_not_shared_with_what_has_none(order):
    def update(a, b):
        a.add_(1)
        return a + b

    for number in order:
        kind = list(KINDS.values())[number]
        mine, eager = kind(torch.arange(4.0)), kind(torch.arange(4.0))
        assert_same((fresh(update)(*mine), mine), (update(*eager), eager))


def test_requires_grad_and_strides_and_dtypes_of_inputs_enter_the_key():
    for x in (SQUARE, SQUARE.t(), SQUARE.double(), SQUARE.clone().requires_grad_(), SQUARE[:1], SQUARE.flatten()):
        with counted() as counts:
            result = fresh(lambda x: x * 2)(x)
        assert counts.capture_hits == 0
        torch.testing.assert_close(result, x * 2, check_stride=True)
        assert result.requires_grad == x.requires_grad


def test_options_enter_the_key():
    for options in ({}, {"matmul_precision": "highest"}, {"level": "conservative"}, {"strict": True}):
        with counted() as counts:
            fresh(torch.mm, **options)(SQUARE, SQUARE)
        assert counts.aot_traces == 1, options
    with counted() as counts:
        fresh(torch.mm, cache_size=77, strict=True)(SQUARE, SQUARE)
    assert counts.aot_traces == 0


def test_module_paths_count_where_an_option_reads_them():
    class Named(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.layer = name, nn.Linear(4, 4, bias=False)
            self.add_module(name, self.layer)
            del self.layer

        def forward(self, x):
            return self.get_submodule(self.name)(x.tanh())

    options = {"precision": "bfloat16", "keep_float32": ["exact"]}
    results = {}
    for name in ("rounded", "exact"):
        torch.manual_seed(0)
        model, x = Named(name), torch.linspace(-1, 1, 4).expand(2, 4)
        with torch.no_grad():
            results[name] = (fresh(model, **options)(x) - model(x)).abs().max().item()
    assert results["exact"] < 1e-6 < results["rounded"]


def test_an_evicted_program_is_compiled_again_when_it_is_called():
    models = [nn.Linear(3, n) for n in (1, 2, 3)]
    runs = [compiled(model, cache_size=1) for model in models]
    for _ in range(2):
        for run, model in zip(runs, models, strict=True):
            x = torch.ones(2, 3, requires_grad=True)
            (mine,), (eager,) = (torch.autograd.grad(f(x).square().sum(), x) for f in (run, model))
            torch.testing.assert_close(mine, eager)
    stats = cache_stats()
    assert (stats["size"], stats["max_size"], stats["captures"]["size"]) == (1, 1, 1)
    assert stats["evictions"] >= 5


def test_a_graph_with_constants_too_large_for_the_key_shares_with_none(monkeypatch):
    monkeypatch.setattr("kp_dynamo.cache.graph_text.MAX_CONSTANT_BYTES", 4)
    with counted() as counts:
        for value in (1.0, 2.0, 1.0):
            SESSION.captures.clear()
            run = fresh(lambda x, value=value: x + torch.tensor([value, -1.0]))
            assert run(torch.zeros(2)).tolist() == [value, -1]
            # A freed graph must leave nothing that a later one at its address could meet.
            del run
            gc.collect()
    assert (counts.programs, counts.hits) == (3, 0)


def test_clear_cache_lets_compiled_functions_live():
    run = compiled(lambda x: x * 2 + 1)
    run(SQUARE)
    clear_cache()
    assert cache_stats()["size"] == cache_stats()["captures"]["size"] == 0
    with counted() as counts:
        torch.testing.assert_close(run(SQUARE), SQUARE * 2 + 1)
    assert (counts.programs, counts.aot_traces) == (1, 0)


def test_dynamo_s_reset_keeps_our_cache():
    run = compiled(lambda x: x * 2 + 1)
    run(SQUARE)
    torch._dynamo.reset()
    with counted() as counts:
        run(SQUARE)
    assert (counts.programs, counts.aot_traces, counts.capture_hits) == (0, 0, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_shapes_are_traced_once_and_compiled_once_a_shape(device):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU()).to(device)
    run = compiled(model, dynamic=True)
    # torch restarts a capture when it first finds that it cannot keep a float (eps) symbolic.
    with torch._dynamo.config.patch(specialize_float=True), counted() as counts:
        for rows in (2, 5, 2, 7, 5):
            x = torch.linspace(-1, 1, rows * 3).reshape(rows, 3).to(device).requires_grad_()
            mine, eager = run(x), model(x)
            torch.testing.assert_close(mine, eager, rtol=1e-5, atol=1e-5)
            gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (mine, eager)]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert (counts.aot_traces, counts.graphs, counts.programs) == (1, 2, 6)


def test_sizes_that_are_numbers_in_the_graph():
    def sized(x, n):
        return x.new_zeros(n), x.repeat(n), x * n, n * 2

    run = compiled(sized, dynamic=True)
    for n in (2, 3, 5, 2):
        assert_same(run(SQUARE[0], n), sized(SQUARE[0], n))


def test_numbers_that_change_from_call_to_call():
    # Dynamo makes a number that changes an input; torch_xla would have it switched off.
    with torch._dynamo.config.patch(specialize_float=False, automatic_dynamic_shapes=True):
        run = compiled(lambda x, scale: (x * scale, x + (scale * 2 + 1)))
        for scale in (0.5, 0.7, 0.9, -0.0, 2.0):
            assert_same(run(SQUARE, scale), (SQUARE * scale, SQUARE + (scale * 2 + 1)))


def test_a_miss_names_what_differs(caplog):
    with caplog.at_level(logging.DEBUG, "kp_dynamo"), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for length in (512, 517):
            fresh(lambda x, y: x * 2 - y)(torch.ones(3, length), torch.ones(3, 1))
    (message,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("a new capture")]
    assert message.startswith("a new capture; nearest entry: input 0, dim 1: 512 -> 517")


def test_threads_compile_and_train_concurrently():
    results, start = {}, threading.Barrier(4)

    def work(number):
        model = nn.Sequential(nn.Linear(3, number + 2), nn.Tanh())
        run, x = compiled(model), torch.ones(2, 3)
        start.wait()
        for _ in range(20):
            y = run(x)
            y.sum().backward()
        torch.testing.assert_close(y, model(x))
        results[number] = model[0].weight.grad / 20, torch.autograd.grad(model(x).sum(), model[0].weight)[0]

    with counted() as counts:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
    assert set(results) == {0, 1, 2, 3}
    assert counts.programs == 8
    for mine, eager in results.values():
        torch.testing.assert_close(mine, eager)


def test_threads_call_while_the_cache_is_cleared():
    runs = [compiled(lambda x, n=n: x * n) for n in (2, 3)]
    for run in runs:
        run(SQUARE)
    failures, done = [], threading.Event()

    def work(run, n):
        for _ in range(150):
            if not torch.equal(run(SQUARE), SQUARE * n):
                failures.append(n)

    def clear():
        while not done.wait(0.001):
            clear_cache()

    clearing = threading.Thread(target=clear)
    clearing.start()
    calling = [threading.Thread(target=work, args=(run, n)) for run, n in zip(runs, (2, 3), strict=True)]
    for thread in calling:
        thread.start()
    for thread in calling:
        thread.join(timeout=120)
    done.set()
    clearing.join()
    assert not failures
    assert not any(thread.is_alive() for thread in calling)


def test_statistics_count_hits_misses_and_sizes():
    before = cache_stats()
    for _ in range(3):
        fresh(lambda x: x * 7)(SQUARE)
    after = cache_stats()
    assert after["captures"]["hits"] - before["captures"]["hits"] == 2
    assert after["captures"]["misses"] - before["captures"]["misses"] == 1
    assert (after["size"], after["captures"]["size"]) == (1, 1)


@pytest.mark.parametrize("device", DEVICES)
def test_a_number_that_varies_is_not_answered_with_an_earlier_one(device):
    # AOTAutograd writes a float that is returned into its graph, and guards it.
    run = compiled(lambda x, n: (x * n, n * 2))
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True, specialize_float=False):
        assert [run(SQUARE.to(device), n)[1] for n in (3.5, 5.5, 4.5, 7.5)] == [7, 11, 9, 15]


def test_a_dump_has_the_graphs_the_reports_and_the_key(tmp_path):
    fresh(lambda x: F.silu(x), dump_dir=tmp_path)(torch.ones(3))
    names = {path.name for path in tmp_path.iterdir()}
    [graph] = {name.removesuffix(".key.txt") for name in names if name.endswith(".key.txt")}
    assert {f"{graph}.0.captured.py", f"{graph}.report.json"} < names
    key = (tmp_path / f"{graph}.key.txt").read_text()
    assert "aten.silu" in key
    assert "\ntensors on: cpu\n" in key


def test_a_dump_says_that_a_graph_has_no_key(tmp_path, monkeypatch):
    monkeypatch.setattr("kp_dynamo.cache.graph_text.MAX_CONSTANT_BYTES", 4)
    fresh(lambda x: x + torch.tensor([1.0, 2, 3]), dump_dir=tmp_path)(torch.ones(3))
    [key] = tmp_path.glob("*.key.txt")
    assert key.read_text().startswith("shared with: no other graph")
