import torch

from kp_dynamo.graph.editing import cast_to, erase_unused, insert_attribute, insert_call, replace_node
from kp_dynamo.graph.nodes import calls
from tests.graphs import graph_text, trace_inference

aten = torch.ops.aten


def _sine():
    gm = trace_inference(lambda x: x.sin(), torch.ones(2, 3))
    return gm, next(calls(gm.graph, aten.sin.default))


def test_a_call_has_its_own_value_and_the_origin_of_another():
    gm, sine = _sine()
    sine.meta |= {"stack_trace": "line 1", "original_aten": aten.sin.default}
    with gm.graph.inserting_after(sine):
        made = insert_call(gm.graph, aten.sum.dim_IntList, (sine, [1]), {}, like=sine)
    assert made.meta["val"].shape == made.meta["tensor_meta"].shape == (2,)
    assert made.meta["stack_trace"] == "line 1"
    assert "original_aten" not in made.meta


def test_a_call_without_tensor_operands_gets_its_value():
    gm, sine = _sine()
    with gm.graph.inserting_before(sine):
        made = insert_call(gm.graph, aten.full.default, ([2, 3], 1.0), {}, like=sine, value=sine.meta["val"])
    assert made.meta["val"] is sine.meta["val"]


def test_an_attribute_gets_an_unused_name():
    gm, sine = _sine()
    gm.register_buffer("table", torch.zeros(1))
    with gm.graph.inserting_before(sine):
        made = insert_attribute(gm, "table", torch.ones(2, 3), like=sine)
    replace_node(sine, made)
    gm.recompile()
    assert torch.equal(gm(torch.zeros(2, 3))[0], torch.ones(2, 3))
    assert graph_text(gm).splitlines()[1:] == ["table_: f32[2, 3] = attribute table_", "return (table_,)"]


def test_a_cast_to_its_own_dtype_is_no_cast():
    gm, sine = _sine()
    with gm.graph.inserting_after(sine):
        assert cast_to(sine, torch.float32, like=sine) is sine
        made = cast_to(sine, torch.bfloat16, like=sine)
    assert made.meta["val"].dtype == torch.bfloat16
    erase_unused(made)
    assert len(list(calls(gm.graph, aten._to_copy.default))) == 0
