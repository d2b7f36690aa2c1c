"""Meshes with named axes: what is accepted, what is refused with which words."""

import pytest

from kp_dynamo import TPUConfigurationError
from kp_dynamo.sharding.mesh import NamedMesh


def test_a_mesh_from_a_dict():
    mesh = NamedMesh.of({"data": 4, "model": 2})
    assert (mesh.names, mesh.sizes, mesh.num_devices) == (("data", "model"), (4, 2), 8)
    assert (mesh.size("data"), mesh.size("model"), mesh.has("expert")) == (4, 2, False)
    assert mesh.device_ids == tuple(range(8))
    assert NamedMesh.of(mesh) is mesh


def test_a_mesh_from_the_command_line_and_back():
    mesh = NamedMesh.parse("data=4,model=2")
    assert mesh == NamedMesh.of({"data": 4, "model": 2})
    assert NamedMesh.parse(" data = 4 , model=2") == mesh
    assert NamedMesh.parse(str(mesh)) == mesh


def test_meshes_are_equal_by_axes_and_order():
    assert NamedMesh.of({"data": 4, "model": 2}) == NamedMesh(("data", "model"), (4, 2), tuple(range(8)))
    assert NamedMesh.of({"data": 4, "model": 2}) != NamedMesh.of({"model": 2, "data": 4})
    assert len({NamedMesh.of({"data": 4}), NamedMesh.of({"data": 4})}) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "it has no axis"),
        ({"data": 0}, "the size of 'data' is 0"),
        ({"data": -2}, "the size of 'data' is -2"),
        ({"data": True}, "the size of 'data' is True"),
        ({"data": 4.0}, "the size of 'data' is 4.0"),
        ({"data": "4"}, "the size of 'data' is '4'"),
        ({"": 4}, "the name of an axis is ''"),
        ({4: 4}, "the name of an axis is 4"),
        ((4, 2), "it is a tuple"),
        (8, "it is a int"),
        (None, "it is a NoneType"),
    ],
)
def test_a_bad_mesh(given, words):
    with pytest.raises(TPUConfigurationError) as caught:
        NamedMesh.of(given)
    assert words in str(caught.value)
    assert "Allowed: a dict of axis names to sizes >= 1" in str(caught.value)


def test_names_and_sizes_that_are_not_pairs():
    for names, sizes in ((("data",), (4, 2)), (("data", "data"), (4, 2))):
        with pytest.raises(TPUConfigurationError, match="not one unique pair an axis"):
            NamedMesh(names, sizes)


@pytest.mark.parametrize("ids", [(0, 1, 2), (0, 1, 2, 2), (1, 2, 3, 4)])
def test_devices_that_are_not_each_one_once(ids):
    with pytest.raises(TPUConfigurationError, match="are not the numbers 0 to 3"):
        NamedMesh(("data",), (4,), ids)


@pytest.mark.parametrize("text", ["", "data", "data=", "data=x", "data=4,", "data:4", "data=-4", "data=4.0"])
def test_a_bad_text(text):
    with pytest.raises(TPUConfigurationError, match="a part is not name=number"):
        NamedMesh.parse(text)


def test_a_text_that_names_an_axis_twice():
    with pytest.raises(TPUConfigurationError, match="the axis 'data' occurs twice"):
        NamedMesh.parse("data=4,data=2")
    with pytest.raises(TPUConfigurationError, match="the size of 'data' is 0"):
        NamedMesh.parse("data=0")


def test_an_axis_that_is_not_there():
    with pytest.raises(TPUConfigurationError, match=r"mesh=data=4 has no axis 'model'\. Allowed: 'data'"):
        NamedMesh.of({"data": 4}).size("model")


def test_another_order_of_the_axes_keeps_the_places():
    mesh = NamedMesh.of({"model": 2, "data": 3})
    turned = mesh.beginning_with("data")
    assert (turned.names, turned.sizes, turned.device_ids) == (("data", "model"), (3, 2), (0, 3, 1, 4, 2, 5))
    assert turned.beginning_with("model") == mesh
    assert mesh.beginning_with("model") == mesh
    with pytest.raises(TPUConfigurationError, match="has no axis 'expert'"):
        mesh.beginning_with("expert")
