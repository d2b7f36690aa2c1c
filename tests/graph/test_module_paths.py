"""The module that most of some nodes were traced in."""

from __future__ import annotations

import pytest
from torch import fx, nn

from kp_dynamo.graph.module_paths import main_module, module_of, repeated_modules


def node(*paths: str) -> fx.Node:
    """A node with a stack of modules, as Dynamo writes it."""
    found = fx.Graph().placeholder("x")
    sources = ["L['self']" + "".join(f"._modules['{part}']" for part in path.split(".") if part) for path in paths]
    found.meta["nn_module_stack"] = {source: (source, nn.Module) for source in sources}
    return found


@pytest.mark.parametrize(
    ("nodes", "module"),
    [
        (
            [node("", "layers.0"), node("", "layers.0", "layers.0.mlp"), node("", "layers.0", "layers.0.norm")],
            "layers.0",
        ),
        # A stretch that starts in the middle of a layer belongs to the layer of most of its nodes, if there is one.
        ([node("", "layers.0"), node("", "layers.1"), node("", "layers.1")], "layers.1"),
        ([node("", "layers", "layers.0"), node("", "layers", "layers.1")], "layers"),
        ([node(""), node("")], ""),
        ([node(), node()], ""),
    ],
)
def test_the_module_of_most_nodes(nodes, module):
    assert main_module(nodes) == module


@pytest.mark.parametrize(
    ("paths", "modules"),
    [
        (["model.layers.0.attn", "model.layers.1.attn"], ("model.layers.0", "model.layers.1")),
        (["stages.0.1.mlp", "stages.1.0.mlp"], ("stages.0.1", "stages.1.0")),
        (["layers.0", "layers.1"], ("layers.0", "layers.1")),
        (["shared.attn", "shared.attn"], ("shared.attn", "shared.attn")),
        (["layers.0", "middle"], ("layers", "middle")),
        (["head.out"], ("head.out",)),
    ],
)
def test_a_run_is_named_by_the_part_of_its_path_that_differs(paths, modules):
    assert repeated_modules([[node("", path)] * 2 for path in paths]) == modules


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("getattr(L['self'], '<script>')", "<script> (Linear)"),
        ("getattr(L['self'].layers[0], 'a-b')", "layers.0.a-b (Linear)"),
        ("getattr(getattr(L['self'], 'a-b')._modules['0'], \"it's\").out", "a-b.0.it's.out (Linear)"),
    ],
)
def test_a_module_whose_name_is_no_identifier(source, module):
    """As Dynamo writes its source."""
    found = node("")
    found.meta["nn_module_stack"] = {source: (source, nn.Linear)}
    assert module_of(found) == module
