"""`SPMDConfig`: what is given, and what is refused before a device is used."""

import pytest

from kp_dynamo import SPMDConfig, TPUConfigurationError
from kp_dynamo.sharding.mesh import NamedMesh


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        (SPMDConfig(mesh_shape=(8, 1)), {"data": 8, "model": 1}),
        (SPMDConfig([4]), {"data": 4}),
        (SPMDConfig((2, 2, 2), ("data", "expert", "model"), {"up": "colwise"}), {"data": 2, "expert": 2, "model": 2}),
    ],
)
def test_the_mesh_has_names(config, mesh):
    assert config.mesh == NamedMesh.of(mesh)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh_shape": 8}, r"SPMDConfig.mesh_shape=8 is invalid. Allowed: a tuple of ints >= 1, such as \(8, 1\)"),
        ({"mesh_shape": ()}, r"SPMDConfig.mesh_shape=\(\) is invalid"),
        ({"mesh_shape": "81"}, "SPMDConfig.mesh_shape='81' is invalid"),
        ({"mesh_shape": (8, 0)}, "the size of 'model' is 0"),
        ({"mesh_shape": (8, True)}, "the size of 'model' is True"),
        ({"mesh_shape": (2, 2, 2)}, r"axis_names=\('data', 'model'\) is invalid for mesh_shape=\(2, 2, 2\)"),
        ({"mesh_shape": (2, 2), "axis_names": ("model", "data")}, "the first divides the batch and is 'data'"),
        ({"mesh_shape": (2, 2), "axis_names": "dm"}, "SPMDConfig.axis_names='dm' is invalid"),
        ({"mesh_shape": (2, 2), "axis_names": ("data", "data")}, "not one unique pair an axis"),
        ({"mesh_shape": (8,), "sharding": "fdsp"}, "sharding='fdsp' is invalid. Allowed: 'data', 'fsdp'"),
        ({"mesh_shape": (8,), "sharding": {}}, "sharding={} is invalid"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(TPUConfigurationError, match=message):
        SPMDConfig(**given)
