"""The canonical text of a graph and what else is in a key: what changes it, and what does not."""

import operator

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

from kp_dynamo.cache.call_parts import environment_parts, input_parts, mode_parts, shares_storage
from kp_dynamo.cache.graph_text import _bytes_text, graph_text
from kp_dynamo.cache.identity import Uncacheable
from kp_dynamo.config.options import CompileOptions, ignored_in_key, option_fields
from tests.graphs import trace_inference, trace_joint

X = torch.ones(2, 3)


def text(fn, *args):
    return graph_text(trace_inference(fn, *args))


def test_one_line_a_node_with_dtype_shape_stride_and_every_argument():
    assert_expected_inline(
        text(lambda x: torch.add(x.t(), 2.0, alpha=3).sum(0), X),
        """\
%0: torch.float32[2, 3]/(3, 1) = placeholder()
%1: torch.float32[3, 2]/(1, 3) = aten.t.default(%0)
%2: torch.float32[3, 2]/(1, 3) = aten.add.Tensor(%1, float:2.0, alpha=int:3)
%3: torch.float32[2]/(1,) = aten.sum.dim_IntList(%2, immutable_list(int:0))
%4:  = output(tuple(%3))""",
    )


DIFFERENT = {
    "a constant": (lambda x: x + 1, lambda x: x + 2),
    "its type": (lambda x: x + 1, lambda x: x + 1.0),
    "its sign": (lambda x: torch.full_like(x, 0.0), lambda x: torch.full_like(x, -0.0)),
    "an axis": (lambda x: x.softmax(0), lambda x: x.softmax(1)),
    "the edges": (lambda x: x.sin() - x, lambda x: x - x.sin()),
    "the operator": (lambda x: x.sin(), lambda x: x.cos()),
    "a keyword": (lambda x: x.sum(0, dtype=torch.float64), lambda x: x.sum(0, dtype=torch.float16)),
    "the results": (lambda x: (x.sin(), x.cos()), lambda x: (x.cos(), x.sin())),
    "a result twice": (lambda x: x.sin() * 1, lambda x: (x.sin() * 1,) * 2),
    "bytes held": (lambda x: x + torch.tensor([1.0, 2, 3]), lambda x: x + torch.tensor([1.0, 2, 4])),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_differences_that_change_the_text(pair):
    one, other = (text(fn, X) for fn in pair)
    assert one != other


def test_shapes_strides_and_dtypes_of_inputs_count():
    inputs = [X, torch.ones(3, 2), torch.ones(3, 2).t(), X.double(), X[0], torch.ones(1, 2, 3)]
    assert len({text(lambda x: x * 2, x) for x in inputs}) == len(inputs)


def test_names_do_not_count():
    one, other = trace_inference(lambda x: x.sin().cos(), X), trace_inference(lambda y: y.sin().cos(), X)
    for node in other.graph.nodes:
        node.name = f"renamed_{node.name}"
    assert graph_text(one) == graph_text(other)


def test_a_second_capture_has_the_same_text():
    def step(x, w):
        return torch.nn.functional.layer_norm(x @ w, (4,)).softmax(-1)

    args = (X, torch.ones(3, 4, requires_grad=True))
    assert graph_text(trace_joint(step, *args)) == graph_text(trace_joint(step, *args))


def nested(inner_constant):
    """A graph that calls a graph."""
    inner = fx.Graph()
    inner.output((inner.call_function(operator.add, (inner.placeholder("x"), inner_constant)),))
    graph = fx.Graph()
    x, body = graph.placeholder("x"), graph.get_attr("body")
    graph.output(graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", x)))
    root = torch.nn.Module()
    root.body = fx.GraphModule(torch.nn.Module(), inner)
    return fx.GraphModule(root, graph)


def test_graphs_inside_count():
    assert graph_text(nested(1)) == graph_text(nested(1))
    assert graph_text(nested(1)) != graph_text(nested(2))


def test_module_paths_count_where_they_are_asked_for():
    gm = trace_inference(lambda x: x.sin(), X)
    before = graph_text(gm, with_modules=True)
    next(n for n in gm.graph.nodes if n.op == "call_function").meta["nn_module_stack"] = {"L": ("model.head", object)}
    assert graph_text(gm, with_modules=True) != before
    assert "model.head" in graph_text(gm, with_modules=True)
    assert graph_text(gm) == graph_text(trace_inference(lambda x: x.sin(), X))


def with_argument(value):
    graph = fx.Graph()
    graph.output(graph.call_function(operator.add, (graph.placeholder("x"), value)))
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("value", [object(), lambda x: x, {1, 2}, range(3)], ids=["object", "lambda", "set", "range"])
def test_graphs_without_a_stable_text_are_refused(value):
    gm = with_argument(None)
    next(n for n in gm.graph.nodes if n.op == "call_function").args = (value,)
    with pytest.raises(Uncacheable, match=f"an argument of type {type(value).__name__}"):
        graph_text(gm)


def test_a_constant_too_large_or_on_a_device_is_refused(monkeypatch):
    gm = trace_inference(lambda x: x + torch.tensor([1.0, 2, 3]), X)
    assert graph_text(gm)
    monkeypatch.setattr("kp_dynamo.cache.graph_text.MAX_CONSTANT_BYTES", 11)
    with pytest.raises(Uncacheable, match="a constant on cpu with 3 elements"):
        graph_text(gm)


def test_plain_values_keep_their_type():
    values = [
        1,
        1.0,
        True,
        "1",
        None,
        (1,),
        [1],
        slice(1),
        1 + 0j,
        torch.float32,
        torch.strided,
        torch.device("cpu"),
        ...,
    ]
    texts = [graph_text(with_argument(value)) for value in values]
    assert len(set(texts)) == len(values)


def test_inputs_in_all_that_compilation_depends_on():
    base = torch.arange(6.0)
    leaf = X.clone().requires_grad_()
    variants = [
        (X,),
        (X.double(),),
        (X.t(),),
        (torch.ones(2, 4)[:, :3],),
        (leaf,),
        (leaf * 1,),
        (torch.nn.Parameter(X),),
        (X.to(torch.complex64).conj(),),
        (X.to(torch.complex64),),
        (torch._neg_view(X),),
        (X.to("xla"),),
        (7,),
        (True,),
        (base[:4], base[2:]),
        (base[:4], base[2:].clone()),
        (base[:4], base[1:5]),
    ]
    with torch.inference_mode():
        variants.append((torch.ones(2, 3),))
    parts = [input_parts(inputs) for inputs in variants]
    assert len(set(parts)) == len(variants)
    assert input_parts((X,)) == input_parts((torch.zeros(2, 3),))


def test_shared_storage_is_seen():
    base = torch.arange(6.0)
    assert shares_storage([base[:2], base[4:]])
    assert shares_storage([base, base])
    assert not shares_storage([base, base.clone(), 3])
    there = base.to("xla")
    assert shares_storage([there, there])


STATES = {
    "grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast cpu": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast dtype": lambda: torch.autocast("cpu", torch.float16),
    "autocast xla": lambda: torch.autocast("xla", torch.bfloat16),
    "autocast cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "budget": lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
}


def test_the_state_of_the_process_and_the_thread_counts():
    seen = [mode_parts()]
    for state in STATES.values():
        with state():
            seen.append(mode_parts())
    assert len(set(seen)) == len(STATES) + 1
    assert mode_parts() == seen[0]


def test_settings_without_a_context_count():
    before = mode_parts()
    torch.set_default_dtype(torch.float64)
    try:
        changed = mode_parts()
    finally:
        torch.set_default_dtype(torch.float32)
    assert changed != before
    torch.use_deterministic_algorithms(True)
    try:
        changed = mode_parts()
    finally:
        torch.use_deterministic_algorithms(False)
    assert changed != before == mode_parts()


def test_versions_device_and_flags_count(monkeypatch):
    found = dict(environment_parts())
    assert dict(found["versions"])["torch"] == torch.__version__.split("+")[0]
    assert all(dict(found["versions"])[name] for name in ("torch", "torch_xla", "kp_dynamo"))
    assert found["device kind"] == "CPU"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert environment_parts.__wrapped__() != environment_parts()


OTHER_VALUES = {
    "level": "aggressive",
    "precision": "float32",
    "matmul_precision": "highest",
    "keep_float32": ["aten.mm"],
    "reduce_dtype": "bfloat16",
    "reduce_scatter": "all_to_all",
    "fuse": False,
    "checkpoint": "blocks",
    "blocks": "on",
    "buckets": "pow2",
    "donate": "mutated",
    "compile_timeout_s": 5.0,
    "over_bucket": "error",
    "optimizer_state_factor": 1.0,
    "memory_fraction": 0.5,
    "memory_budget_gb": 8.0,
    "target": "v6e",
    "disable_passes": ["cast_bf16"],
    "lowering": "stock",
    "strict": True,
    "check_indices": True,
    "ledger": True,
    "cache_size": 3,
    "dump_dir": "graphs",
}


def test_every_option_is_in_the_key_or_on_a_list_that_says_why_not():
    settable = [f.name for f in option_fields()]
    unlisted = set(settable) - set(OTHER_VALUES) - {"extra_passes"}
    assert not unlisted, "a new option: say here whether it changes the key"
    for name, value in OTHER_VALUES.items():
        is_in_key = CompileOptions(**{name: value}).key() != CompileOptions().key()
        assert is_in_key != (name in ignored_in_key()), name
    assert all(len(reason) > 20 for reason in ignored_in_key().values())


def test_a_constant_of_one_element_with_a_stride():
    column = torch.arange(6).reshape(3, 2)[:1, 1]
    assert column.stride() == (2,)
    assert _bytes_text(column) == _bytes_text(column.clone())
