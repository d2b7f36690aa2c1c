"""XLA's notation of a placement, against the one that jax makes of it; the sizes of shards."""

from itertools import permutations, product

import numpy
import pytest

from kp_dynamo import TPUConfigurationError
from kp_dynamo.sharding.mesh import NamedMesh
from kp_dynamo.sharding.placement import (
    check_placement,
    hlo_sharding,
    is_whole,
    placement_of,
    shard_shape,
)

MESHES = (
    {"data": 8},
    {"data": 4, "model": 2},
    {"data": 2, "model": 4},
    {"data": 8, "model": 1},
    {"data": 2, "model": 3, "expert": 2},
    {"data": 1, "model": 1},
)


def _placements(names, rank):
    """Every way to divide `rank` dimensions along these axes, each used at most once."""
    for where in product(range(-1, rank), repeat=len(names)):
        for order in permutations(range(len(names))):
            dims = [tuple(names[i] for i in order if where[i] == dim) for dim in range(rank)]
            yield tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in dims)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_notation_is_that_of_jax(axes):
    """All placements of tensors of 1 to 3 dimensions; XLA's own parser reads the text."""
    from jax._src.lib import xla_client
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    mesh, of_jax = NamedMesh.of(axes), AbstractMesh(tuple(axes.values()), tuple(axes))
    cases = {(rank, placement) for rank in (1, 2, 3) for placement in _placements(tuple(axes), rank)}
    for rank, placement in cases:
        mine = xla_client.HloSharding.from_string(hlo_sharding(placement, mesh, rank))
        expected = NamedSharding(of_jax, PartitionSpec(*placement))._to_xla_hlo_sharding(rank)
        assert _layout(mine, rank) == _layout(expected, rank), (placement, str(mine), str(expected))
    assert len(cases) > 3


def _layout(sharding, rank):
    """Which shard each device holds. jax writes a sharding of axes of size 1 as tiles of one, we write it as whole."""
    if sharding.is_replicated():
        return "whole"
    dims = sharding.tile_assignment_dimensions()
    devices = numpy.array(sharding.tile_assignment_devices()).reshape(*dims[:rank], -1)
    if devices.shape[:rank] == (1,) * rank:
        return "whole"
    return {int(device): index[:rank] for index, device in numpy.ndenumerate(devices)}


@pytest.mark.parametrize(
    ("axes", "placement", "text"),
    [
        ({"data": 4}, ("data", None), "{devices=[4,1]0,1,2,3}"),
        ({"data": 4}, (None, None), "{replicated}"),
        ({"data": 4}, (), "{replicated}"),
        ({"data": 2, "model": 2}, ("data",), "{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}"),
        ({"data": 2, "model": 2}, (None, "model"), "{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}"),
        ({"data": 2, "model": 2}, ("model", "data"), "{devices=[2,2]0,2,1,3}"),
        ({"data": 2, "model": 2}, (("data", "model"), None), "{devices=[4,1]0,1,2,3}"),
        ({"data": 2, "model": 2}, (("model", "data"), None), "{devices=[4,1]0,2,1,3}"),
        ({"data": 4, "model": 1}, ("data", "model"), "{devices=[4,1]0,1,2,3}"),
        ({"data": 4, "model": 1}, (None, "model"), "{replicated}"),
    ],
)
def test_the_text(axes, placement, text):
    assert hlo_sharding(placement, NamedMesh.of(axes), 2) == text


def test_the_order_of_the_devices_is_that_of_the_mesh():
    mesh = NamedMesh(("data", "model"), (2, 2), (3, 1, 0, 2))
    assert hlo_sharding(("data", None), mesh, 2) == "{devices=[2,1,2]1,3,0,2 last_tile_dim_replicate}"
    assert hlo_sharding((None, "model"), mesh, 2) == "{devices=[1,2,2]0,3,1,2 last_tile_dim_replicate}"


def test_shards_and_their_padding():
    mesh = NamedMesh.of({"data": 4, "model": 2})
    assert shard_shape((8, 6), ("data", "model"), mesh) == (2, 3)
    assert shard_shape((8, 6), (("data", "model"),), mesh) == (1, 6)
    assert shard_shape((10, 5, 3), ("data", "model"), mesh) == (3, 3, 3)
    assert shard_shape((), (), mesh) == ()


def test_an_axis_of_size_one_divides_nothing():
    mesh = NamedMesh.of({"data": 4, "model": 1})
    assert is_whole((None, "model"), mesh)
    assert is_whole((), mesh)
    assert not is_whole(("data",), mesh)


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (("expert",), r"mesh=data=4,model=2 has no axis 'expert'. Allowed: 'data', 'model'"),
        (("data", "data"), "uses an axis of the mesh twice"),
        ((("data", "data"), None), "uses an axis of the mesh twice"),
        (("data", None, None), "is invalid for a tensor of 2 dimensions"),
    ],
)
def test_a_placement_that_cannot_be(placement, words):
    with pytest.raises(TPUConfigurationError, match=words):
        check_placement(placement, NamedMesh.of({"data": 4, "model": 2}), 2)


@pytest.mark.parametrize("axes", MESHES)
def test_a_text_is_read_as_a_placement_that_xla_writes_so(axes):
    mesh = NamedMesh.of(axes)
    for placement in _placements(mesh.names, 2):
        text = hlo_sharding(placement, mesh, 2)
        assert hlo_sharding(placement_of(text, mesh, 2), mesh, 2) == text


def test_a_text_of_another_mesh_is_no_placement():
    text = hlo_sharding(("data", None), NamedMesh.of({"data": 8}), 2)
    assert placement_of(text, NamedMesh.of({"data": 4, "model": 2}), 2) == (("data", "model"), None)
    assert placement_of(text, NamedMesh.of({"data": 4}), 2) is None
