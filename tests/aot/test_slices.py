"""Bad `chips`, `mesh` and `sharding`: each is refused before anything is traced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kp_dynamo.aot.compiling import aot_compile
from kp_dynamo.aot.slices import slice_of
from kp_dynamo.exceptions import TPUConfigurationError

X = (torch.empty(8, 64),)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"mesh": {"data": 4}}, r"mesh=\{'data': 4\} needs chips"),
        ({"sharding": "fsdp"}, "sharding='fsdp' needs chips, such as chips=16"),
        ({"chips": 5, "sharding": "fsdp"}, "chips=5 is invalid for target='v5e': it is not sold"),
        ({"chips": "3x3", "sharding": "fsdp"}, "the shape is not sold"),
        ({"chips": 4}, "chips=4 needs a sharding. Allowed: 'data', 'fsdp'"),
        ({"chips": 4, "mesh": {"data": 2}, "sharding": "fsdp"}, "mesh=data=2 is invalid: it has 2 places, but v5e 2x2"),
        ({"chips": 4, "mesh": {"data": 0}, "sharding": "fsdp"}, "the size of 'data' is 0"),
        ({"chips": 1, "mesh": {"data": 2}}, "sizes whose product is 1"),
        ({"chips": 4, "sharding": "fsdp", "backend": "openxla"}, "backend='openxla' is unsupported for several chips"),
        (
            {"chips": 4, "sharding": "fsdp", "options": {"lowering": "stock"}},
            "lowering='stock' is unsupported for several chips",
        ),
        (
            {"chips": 4, "mesh": {"data": 2, "model": 2}, "sharding": "fsdp+tensor", "target": "v7"},
            "it has 4 places, but v7 2x2x1 has 4 chips with 2 devices each. Allowed: sizes whose product is 8. Try: "
            "data=2,model=4.",
        ),
        (
            {"chips": 4, "mesh": {"data": 3}, "sharding": "fsdp", "target": "v7"},
            "with 2 devices each. Allowed: sizes whose product is 8.$",
        ),
        ({"chips": 4, "sharding": "sideways"}, "sharding='sideways'"),
        ({"chips": 4, "sharding": "data", "batch": 6}, "a batch of 6 does not divide among 4 chips along 'data'"),
        ({"chips": 4, "mesh": {"model": 4}, "sharding": "fsdp"}, "'data'"),
    ],
)
def test_bad_input_is_refused(given, expected):
    args = (torch.empty(given.get("batch", 8), 64),)
    given = {name: value for name, value in given.items() if name != "batch"}
    with pytest.raises(TPUConfigurationError, match=expected):
        aot_compile(nn.Linear(64, 64), args, **{"target": "v5e", **given})


def test_one_chip_is_no_slice():
    assert slice_of("v5e", None, None, None) is None
    assert slice_of("v5e", 1, None, None) is None
    assert slice_of("v5e", "1x1", {"data": 1}, "fsdp") is None


def test_by_default_all_chips_are_along_data():
    found = slice_of("v5e", 16, None, "fsdp")
    assert (str(found.mesh), str(found.topology)) == ("data=16", "4x4")


def test_a_chip_of_v7_is_two_places_of_the_mesh():
    assert str(slice_of("v7", 16, None, "fsdp").mesh) == "data=32"
    assert slice_of("v7", "2x2x4", {"data": 16, "model": 2}, "tensor").topology.num_devices == 32
    assert slice_of("v7", None, None, None) is None
