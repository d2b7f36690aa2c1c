"""What a graph holds at the very least, and the refusal before the long compile."""

from __future__ import annotations

import pytest
import torch

from kp_dynamo.compat import chips
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUOutOfMemoryError
from kp_dynamo.graph.least_memory import MemoryBudget, held_by, remedies, require_room
from kp_dynamo.hardware import CHIPS
from tests.graphs import trace_inference
from tests.spine import compiled


def product(a, b):
    return a @ b, a


def test_arguments_and_new_results_count_once():
    gm = trace_inference(product, torch.ones(8, 16), torch.ones(16, 4))
    held = held_by(gm.graph)
    assert [(h.role, h.text, h.num_bytes) for h in held] == [
        ("argument", "float32[8, 16]", 512),
        ("argument", "float32[16, 4]", 256),
        ("result", "float32[8, 4]", 128),
    ]


def test_what_fits_is_measured_and_what_does_not_is_refused():
    gm = trace_inference(product, torch.ones(8, 16), torch.ones(16, 4))
    assert require_room(gm.graph, "inference", MemoryBudget(CHIPS["v5e"], 896)) == 896
    with pytest.raises(TPUOutOfMemoryError, match=r"at least 0.00 GB for its 3 arguments and results.*v5e") as refused:
        require_room(gm.graph, "inference", MemoryBudget(CHIPS["v5e"], 895))
    message = str(refused.value)
    assert "argument float32[8, 16]" in message
    assert "smaller batch" in message
    assert "bfloat16" in message
    assert 'target="v5p"' in message


@pytest.mark.parametrize(
    ("checkpoint", "remedy"),
    [
        ("off", 'checkpoint="blocks" or "auto"'),
        ("attention", 'checkpoint="blocks" or "auto"'),
        ("blocks", 'checkpoint="auto"'),
        (0.5, "checkpoint=0.25"),
        ("auto", ""),
        (0.0, ""),
    ],
)
def test_no_remedy_is_on_already(checkpoint, remedy):
    text = remedies(checkpoint, "another")
    assert ("checkpoint" in text) == bool(remedy)
    assert remedy in text
    assert "; another; " in text
    gm = trace_inference(product, torch.ones(8, 16), torch.ones(16, 4))
    with pytest.raises(TPUOutOfMemoryError) as refused:
        require_room(gm.graph, "inference", MemoryBudget(CHIPS["v5e"], 1, checkpoint))
    assert ("checkpoint" in str(refused.value)) == bool(remedy)


def test_equal_tensors_are_named_once():
    gm = trace_inference(lambda xs: [x + 1 for x in xs], [torch.ones(4, 4) for _ in range(8)])
    with pytest.raises(TPUOutOfMemoryError, match=r"8 x argument float32\[4, 4\]"):
        require_room(gm.graph, "inference", MemoryBudget(CHIPS["v5e"], 1))


def test_the_users_line_is_named():
    with pytest.raises(Exception, match=r"test_least_memory\.py:\d+ in product"):
        compiled(product, memory_budget_gb=1e-6)(torch.ones(64, 64), torch.ones(64, 64))


def test_a_named_target_is_checked_before_the_compile():
    big, small = torch.ones(64, 64), torch.ones(2, 2)
    run = compiled(torch.sin, memory_budget_gb=1e-6)
    with pytest.raises(Exception, match=r"takes at least 0\.00 GB") as failure:
        run(big)
    assert isinstance(failure.value.inner_exception, TPUOutOfMemoryError)
    assert torch.allclose(run(small), small.sin())  # the process goes on


def test_without_a_named_memory_nothing_is_refused():
    assert compiled(torch.sin)(torch.ones(64, 64)).shape == (64, 64)


def test_the_chip_of_this_machine_decides_where_none_is_named(monkeypatch):
    monkeypatch.setattr(chips, "chip_name", lambda: "v6e")
    with pytest.raises(Exception, match="of a v6e"):
        compiled(torch.sin, memory_budget_gb=1e-6)(torch.ones(64, 64))
    with pytest.raises(Exception, match="of a v4"):
        compiled(torch.sin, memory_budget_gb=1e-6, target="v4")(torch.ones(64, 64))
    assert CompileOptions().on("v6e").is_memory_bounded
    assert CompileOptions(target="v4").on("v6e").chip is CHIPS["v4"]
