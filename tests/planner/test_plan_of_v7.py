"""Plans for v7, whose chips are two devices: meshes and memory count devices, slices and prices chips."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from kp_dynamo.aot.topologies import topology_of
from kp_dynamo.aot.worker_process import separate_versions
from kp_dynamo.exceptions import TPUNotAvailableError, TPUOutOfMemoryError
from kp_dynamo.hardware import CHIPS, GIB
from kp_dynamo.planner import planning
from kp_dynamo.planner.bounds import Facts, link_seconds, time_bound
from kp_dynamo.planner.candidates import Candidate, Layout, layouts, sold
from kp_dynamo.planner.planning import plan
from kp_dynamo.planner.step_facts import Activations, Amount
from kp_dynamo.planner.weights import weights_of

V7 = CHIPS["v7"]
TOKENS = (torch.zeros(8, 128, dtype=torch.long),)


class Head(nn.Module):
    """A head over a table of embeddings."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1024, width), nn.Linear(width, 1024, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(tokens)).flatten(0, 1), tokens.flatten())


def head(width: int = 256) -> nn.Module:
    with torch.device("meta"):
        return Head(width)


def test_slices_count_chips_and_meshes_devices():
    assert [t.num_chips for t in sold("v7", 16)] == [4, 8, 16]
    found = list(layouts(topology_of("v7", 4), with_tensor=True))
    assert {layout.data * layout.model for layout in found} == {8}
    assert (found[0].data, found[0].sharding) == (8, "data")
    assert max(layout.model for layout in found) == 8


def test_bounds_are_those_of_a_device():
    layout = Layout(topology_of("v7", 4), 8, 1, "fsdp")
    weights = weights_of(head(), layout.mesh, layout.sharding, {"head.weight": 2}, True)
    facts = Facts(weights, Activations((), Amount(per_sample=10**9)), 10**15, 1024, 0, 2.0, True)
    found = time_bound(Candidate(layout, 2, 3, "off"), facts)
    assert found.matmuls == pytest.approx(10**15 * 2 * 3 * 8 / 4 / V7.bf16_flops)  # by all four chips
    assert found.traffic == pytest.approx(3 * 2 * 10**9 / (V7.hbm_bytes_per_s / 2))


def test_the_devices_of_a_chip_are_neighbours_along_the_model_axis():
    pairs = Layout(topology_of("v7", 4), 4, 2, "tensor")
    assert link_seconds(pairs, "model", "all-gather", 12 * 10**9) == pytest.approx(6 / 600)
    assert link_seconds(pairs, "data", "all-gather", 12 * 10**9) == pytest.approx(9 / 100)


def test_a_plan_prices_chips_and_says_what_a_device_is():
    found = plan(head(), TOKENS, train=True, targets=["v7"], max_chips=4, num_compiled=0)
    row = found.winner
    assert (row.num_chips, row.topology, row.is_runnable) == (4, "2x2x1", True)
    assert row.mesh["data"] * row.mesh.get("model", 1) == 8
    assert row.budget_bytes == pytest.approx(0.9 * 96 * GIB)
    per_second = 4 * V7.usd_per_hour / 3600
    assert row.usd_per_million == pytest.approx(row.step_ms / 1e3 * per_second * 1e6 / row.step_tokens)
    assert "A chip of v7 is two devices: its mesh arranges them, and GB are those of one." in str(found)
    assert "Memory of a device" in found.to_html()
    other = plan(head(), TOKENS, train=True, targets=["v5e"], max_chips=1, num_compiled=0)
    assert "device" not in str(other)


def test_what_fits_nowhere_names_the_least_memory_of_a_device():
    with pytest.raises(TPUOutOfMemoryError, match=r"it takes at least [\d.]+ GB a device \(4 v7, mesh") as caught:
        plan(head(2**25), TOKENS, train=True, targets=["v7"], max_chips=4, num_compiled=0)
    assert "Allowed: 92.77 GB." in str(caught.value)


def test_without_its_compiler_the_model_is_not_captured(monkeypatch):
    monkeypatch.setenv("KP_TPU_V7_PYTHON", "/no/such/python")
    monkeypatch.setattr(planning, "_captures", lambda request: pytest.fail("it captured the model"))
    with pytest.raises(TPUNotAvailableError, match="make aot-v7"):
        plan(head(), TOKENS, targets=["v5e", "v7"])


def test_stored_results_depend_on_the_compiler_of_v7(monkeypatch, tmp_path):
    python = tmp_path / "python"
    monkeypatch.setenv("KP_TPU_V7_PYTHON", str(python))
    python.write_text('#!/bin/sh\necho \'{"jax": "1.2", "libtpu": "3.4"}\'\n')
    python.chmod(0o755)
    assert separate_versions("v7") == {"jax": "1.2", "libtpu": "3.4"}
    assert separate_versions("v5e") == {}
    monkeypatch.setenv("KP_TPU_V7_PYTHON", sys.executable)
    assert separate_versions("v7") == {}  # the environment of this process, whose versions are known
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("KP_TPU_V7_PYTHON", str(broken))
    with pytest.raises(TPUNotAvailableError, match="no jax or no libtpu"):
        separate_versions("v7")
