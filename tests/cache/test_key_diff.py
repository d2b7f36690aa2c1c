"""Why a key missed: the nearest cached key and exactly what differs."""

import pickle
import subprocess
import sys
from typing import NamedTuple

import pytest

from kp_dynamo.cache.compile_key import CompileKey
from kp_dynamo.cache.key_diff import explain_miss

GRAPH = """\
x: f32[2, 512] = input
w: f32[512, 8] = input
mm: f32[2, 8] = aten.mm.default(x, w)
add: f32[2, 8] = aten.add.Tensor(mm, 1)
return (add,)"""


class Input(NamedTuple):
    dtype: str
    shape: tuple
    stride: tuple
    requires_grad: bool = False


X, W = Input("f32", (2, 512), (512, 1)), Input("f32", (512, 8), (8, 1))


def _key(graph=GRAPH, inputs=(X, W), pipeline="FoldConstants(), CastBf16(scope='matmul')", **other):
    return CompileKey((("inputs", inputs), ("graph", graph), ("pipeline", pipeline), *other.items()))


@pytest.mark.parametrize(
    ("new", "explanation"),
    [
        (_key(inputs=(X, Input("f32", (512, 9), (9, 1)))), "input 1, dim 1: 8 -> 9"),
        (
            _key(inputs=(Input("f32", (2, 1, 512), (512, 512, 1)), W)),
            "input 0, rank: 2 -> 3, shape [2, 512] -> [2, 1, 512]",
        ),
        (_key(inputs=(X._replace(dtype="bf16"), W)), "input 0, dtype: f32 -> bf16"),
        (_key(inputs=(X._replace(stride=(1, 2)), W)), "input 0, stride: (512, 1) -> (1, 2)"),
        (_key(inputs=(X, W._replace(requires_grad=True))), "input 1, requires_grad: False -> True"),
        (_key(inputs=(X,)), "number of inputs: 2 -> 1"),
        (_key(GRAPH.replace("aten.add", "aten.sub")), "graph: node 3 aten.add.Tensor -> aten.sub.Tensor"),
        (
            _key(GRAPH.replace("mm, 1", "mm, 2")),
            "graph: node 3 add: f32[2, 8] = aten.add.Tensor(mm, 1) -> add: f32[2, 8] = aten.add.Tensor(mm, 2)",
        ),
        (
            _key(GRAPH.replace("[2, 8]", "[2, 9]").replace("aten.add", "aten.mul")),
            "graph: node 3 aten.add.Tensor -> aten.mul.Tensor (2 of 5 lines differ)",
        ),
        (_key(GRAPH.removesuffix("\nreturn (add,)")), "graph: node 4 return (add,) -> nothing"),
        (_key(GRAPH + "\n"), "graph: line ends differ"),
        (_key(pipeline="FoldConstants()"), "pipeline: FoldConstants(), CastBf16(scope='matmul') -> FoldConstants()"),
        (_key(mesh="2x4"), "mesh: only in the new key"),
        (
            _key(GRAPH.replace("512", "517"), (Input("f32", (2, 517), (517, 1)), W)),
            "input 0, dim 1: 512 -> 517; graph: node 0 x: f32[2, 512] = input -> x: f32[2, 517] = input "
            "(2 of 5 lines differ)",
        ),
    ],
)
def test_one_change_is_named(new, explanation):
    assert explain_miss(new, [_key()]) == explanation
    assert new != _key()


def test_a_part_that_went_away_is_named():
    assert explain_miss(_key(), [_key(mesh="2x4")]) == "mesh: only in the cached key"


def test_the_nearest_of_several_is_compared():
    far = _key("y: f32[1] = input\nreturn (y,)", (X,), "")
    near = _key(inputs=(X, W._replace(dtype="bf16")))
    assert explain_miss(_key(), [far, near, far]) == "input 1, dtype: bf16 -> f32"


def test_a_graph_with_many_other_lines_is_far():
    other_graph = _key(GRAPH.replace("f32", "bf16"))
    two_other_inputs = _key(inputs=(X._replace(dtype="bf16"), W._replace(dtype="bf16")))
    assert explain_miss(_key(), [other_graph, two_other_inputs]).startswith("input 0, dtype")


def test_only_the_first_differences_are_shown():
    new = _key(inputs=(Input("bf16", (3, 3), (1, 3), True), Input("bf16", (3, 3), (1, 3), True)))
    assert explain_miss(new, [_key()]).endswith("; and 4 more")


def test_a_long_text_is_cut_around_the_difference():
    explanation = explain_miss(_key(pipeline="a" * 500 + "b"), [_key(pipeline="a" * 500 + "c" * 500)])
    assert explanation == f"pipeline: ...{'a' * 24}{'c' * 56}... -> ...{'a' * 24}b"


def test_an_empty_cache_and_an_equal_key_are_said():
    assert explain_miss(_key(), []) == "the cache is empty"
    assert explain_miss(_key(), [_key()]) == "an equal entry is cached"


def test_equal_parts_are_one_key():
    assert {_key(): 1}[_key()] == 1
    assert _key() != "another kind of key"


def test_a_key_that_travelled_is_found(tmp_path):
    """Another process hashes strings with another seed."""
    code = (
        "import sys, pickle; from kp_dynamo.cache.compile_key import CompileKey; "
        "sys.stdout.buffer.write(pickle.dumps(CompileKey((('graph', 'text'),))))"
    )
    travelled = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert pickle.loads(travelled) in {CompileKey((("graph", "text"),))}
