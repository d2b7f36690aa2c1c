"""Large tensors that every chip holds whole are named."""

import torch
from torch import nn

from kp_dynamo.sharding.large_tensors import LARGE_BYTES, large_whole_tensors
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.rules import placements


def _model():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"small": nn.Linear(4096, 4096), "up": nn.Linear(4096, 8192), "head": nn.Linear(4096, 16384)}
        )
        model.register_buffer("mask", torch.ones(1, LARGE_BYTES + 1, dtype=torch.uint8))
    return model


def test_what_is_whole_and_large_is_named_largest_first():
    mesh = NamedMesh.of({"data": 4, "model": 2})
    model = _model()
    found = placements(model, mesh, {"up": "colwise"})
    sizes = large_whole_tensors(model, found, mesh)
    assert list(sizes.items()) == [("head.weight", 16384 * 4096 * 4), ("mask", LARGE_BYTES + 1)]


def test_the_limit_itself_is_not_large():
    mesh = NamedMesh.of({"data": 4})
    assert "small.weight" not in large_whole_tensors(_model(), placements(_model(), mesh, "data"), mesh)


def test_one_device_replicates_nothing():
    mesh = NamedMesh.of({"data": 1})
    assert large_whole_tensors(_model(), placements(_model(), mesh, "data"), mesh) == {}


def test_fsdp_leaves_only_buffers_whole():
    mesh = NamedMesh.of({"data": 4})
    assert list(large_whole_tensors(_model(), placements(_model(), mesh, "fsdp"), mesh)) == ["mask"]
