"""Regions of `torch.compiler.nested_compile_region`: results are eager's, and programs those of the plain model."""

import copy

import pytest
import torch
from torch import nn

from kp_dynamo import clear_cache
from kp_dynamo.capture.nested_regions import inline_nested_regions
from kp_dynamo.graph.module_paths import module_paths
from tests.blocks import stacks
from tests.blocks.test_divided_models import distances, divided, named, step
from tests.spine import compiled, counted

X = torch.randn(2, 5, 3)


def nested(layer):
    """The class of a layer whose forward is a region."""

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return layer.forward(self, x)

    return type(f"Nested{layer.__name__}", (layer,), {"forward": forward})


class Normalized(nn.Module):
    """BatchNorm writes its statistics, and a checkpoint inside the region is a graph of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.inner = nn.Linear(8, 8), nn.BatchNorm1d(5), stacks.Layer()

    def forward(self, x):
        x = torch.relu_(self.norm(self.linear(x))) + x
        return stacks.checkpoint(self.inner, x, use_reentrant=False)


class Inner(stacks.Stack):
    """Two layers, which are regions inside a region."""

    def __init__(self):
        super().__init__(2, nested(stacks.Layer))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.sin(x)


@torch.compiler.nested_compile_region
def call(layer, x):
    return layer(x)


class ByFunction(stacks.Stack):
    """The region is a function that calls the layer, so that its own modules are those of the model."""

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = call(layer, x)
        return self.head(x)


class InBothModes(stacks.Stack):
    """The first layer runs without gradients, where Dynamo traces it, and then with them."""

    def forward(self, x):
        with torch.no_grad():
            x = self.layers[0](self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS = {
    "layers": (lambda: stacks.Stack(4, nested(stacks.Layer)), (1, 4, 1)),
    "statistics": (lambda: stacks.Stack(4, nested(Normalized)), (1, 4, 1)),
    "inner": (lambda: stacks.Stack(3, nested(Inner)), (1, 3, 1)),
    "function": (lambda: ByFunction(4), (1, 4, 1)),
    "modes": (lambda: InBothModes(4, nested(stacks.Layer)), (1, 3, 1)),
    "checkpoint": (lambda: stacks.Checkpointed(4, nested(stacks.Layer)), (1, 4, 1)),
}


@pytest.mark.quick("statistics-True-cpu-on", "inner-True-cpu-on", "modes-True-cpu-on", "statistics-False-xla-auto")
@pytest.mark.parametrize(
    ("name", "trains", "device", "blocks"),
    [
        *((name, True, "cpu", "on") for name in MODELS),
        ("statistics", True, "xla", "off"),
        ("statistics", False, "xla", "auto"),
    ],
)
def test_as_eager(name, trains, device, blocks):
    make, runs = MODELS[name]
    eager = make().train(trains)
    mine, events = divided(copy.deepcopy(eager).to(device), blocks=blocks)
    got, wanted = step(mine, (X.to(device),), trains=trains), step(eager, (X,), trains=trains)
    assert max(distances((got[0], named(got[1]), named(got[2])), wanted[:3])) < 2e-6
    assert blocks != "on" or tuple(piece.runs for piece in events[0].pieces) == runs


@pytest.mark.parametrize("blocks", ["on", "off"])
def test_programs_are_those_of_the_plain_model(blocks):
    step(compiled(stacks.Stack(3), blocks=blocks), (X,), trains=True)
    with counted() as counts:
        step(compiled(stacks.Stack(3, nested(stacks.Layer)), blocks=blocks), (X,), trains=True)
    assert counts.programs == 0


def captured(model, x):
    """Dynamo's graph of `model`, inlined."""
    found = []

    def backend(gm, _):
        inline_nested_regions(gm)
        gm.graph.lint()
        found.append(gm)
        return gm.forward

    torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    return found[0]


@pytest.mark.parametrize("kind", [ByFunction, lambda n: stacks.Stack(n, nested(stacks.Layer))])
def test_nodes_are_of_the_layer_that_called(kind):
    gm = captured(kind(3), X)
    paths = [list(module_paths(node))[-1] for node in gm.graph.nodes if node.target is torch._C._nn.linear]
    assert paths == ["embed", *(f"layers.{i}.{name}" for i in range(3) for name in ("up", "down")), "head"]


def memory_of(node):
    return node.meta["example_value"].untyped_storage()._cdata


def test_values_of_two_calls_share_no_memory():
    gm = captured(stacks.Stack(2, nested(Normalized)).eval(), X)
    first, second = (node for node in gm.graph.nodes if node.target is torch.relu_)
    assert memory_of(first) != memory_of(second)
    assert [memory_of(node.args[0]) for node in (first, second)] == [memory_of(first), memory_of(second)]


def test_precision_by_module_path_reaches_one_layer():
    eager = stacks.Stack(3)
    with torch.no_grad():
        plain, _ = divided(eager, precision="bfloat16", keep_float32=["layers.1.*"])
        region = stacks.Stack(3, nested(stacks.Layer))
        region.load_state_dict(eager.state_dict())
        assert torch.equal(divided(region, precision="bfloat16", keep_float32=["layers.1.*"])[0](X), plain(X))


def compile_regions(module, **kwargs):
    """Each layer of a ModuleList, and each other module, compiled by itself, as Accelerate's `compile_regions` does."""
    children = dict(module.named_children())
    if isinstance(module, nn.ModuleList):
        return nn.ModuleList(torch.compile(layer, **kwargs) for layer in module)
    if not any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        return torch.compile(module, **kwargs)
    new = copy.copy(module)
    new._modules = {name: compile_regions(child, **kwargs) for name, child in children.items()}
    return new


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it where a graph begins
def test_layers_that_are_compiled_one_by_one():
    found = []
    for depth in (3, 6):
        clear_cache()
        torch._dynamo.reset()
        eager = stacks.Stack(depth).to("xla")
        mine = compile_regions(eager, backend="kp_tpu", options={"precision": "float32"})
        with counted() as counts:
            got = step(mine, (X.to("xla"),), trains=True)
        wanted = step(copy.deepcopy(eager).cpu(), (X,), trains=True)
        assert max(distances((got[0], {n: p.grad for n, p in eager.named_parameters()}), wanted[:2])) < 2e-6
        found.append(counts.programs)
    assert found[0] == found[1]
