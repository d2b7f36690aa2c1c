"""The module that most of some nodes were traced in."""

from __future__ import annotations

import pytest
from torch import fx, nn

from kp_dynamo.graph.module_paths import main_module


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
