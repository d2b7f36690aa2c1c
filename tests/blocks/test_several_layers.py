"""Programs of several equal layers: `blocks` as a number, and what "auto" chooses."""

import copy

import pytest
import torch
from torch import nn

from kp_dynamo import explain
from kp_dynamo.blocks.policy import group_sizes, num_calls
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.exceptions import TPUConfigurationError
from kp_dynamo.explanation.page_content import layers_sentence
from kp_dynamo.graph.module_paths import paths_of_runs
from tests.blocks import stacks
from tests.blocks.dividing import divide
from tests.blocks.test_composition import close, gradients
from tests.blocks.test_divided_models import MODELS, distances, divided, is_float, named, step
from tests.spine import on

# The runs of each piece with two layers a program; what is missing has too few layers.
RUNS_OF_TWO = {
    "plain": (1, 2, 1), "hidden states": (1, 2, 1), "u-net": (1, 2, 2, 1), "shared": (1, 2, 1), "masked": (1, 2),
    "resnet": (1, 2, 1), "caches": (2,), "checkpoint": (1, 2, 1), "views": (1, 2, 1), "encoder and decoder": None,
}  # fmt: skip


@pytest.mark.quick("u-net-xla", "caches-cpu", "resnet-cpu", "encoder and decoder-cpu")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("name", RUNS_OF_TWO)
def test_two_layers_a_program_compute_what_the_model_does(name, device):
    make, arguments, _ = MODELS[name]
    trains = name != "caches"
    eager, args = make().train(trains), arguments()
    args = on("cpu", [a.requires_grad_(trains) if is_float(a) else a for a in args])
    mine, events = divided(copy.deepcopy(eager).to(device), blocks=2)
    given, rounded = on(device, args), on("cpu", args)
    for _ in range(2):
        got, wanted = (step(model, a, trains=trains) for model, a in ((mine, given), (eager, rounded)))
        both = ((r[0], named(r[1]), named(r[2]), a) for r, a in ((got, given), (wanted, rounded)))
        assert max(distances(*both)) < 1e-5
        eager.zero_grad()
        mine.zero_grad()
    assert (tuple(piece.runs for piece in events[0].pieces) or None) == RUNS_OF_TWO[name], events[0].reason


def test_what_is_left_over_belongs_to_the_next_piece():
    model = stacks.Stack(7)
    mine, events = divided(copy.deepcopy(model), blocks=3)
    x = torch.randn(2, 5, 3)
    assert close(gradients(mine, x), gradients(model, x))
    found = [(piece.runs, piece.layers, piece.modules) for piece in events[0].pieces]
    assert found == [(1, 1, ("embed",)), (2, 3, tuple(f"layers.{i}" for i in range(6))), (1, 1, ("layers.6",))]


class Earlier(nn.Module):
    """Every layer reads the result before the last; the fourth reads the one before that, which has the same shape."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x):
        found = [x * 0.5, x * 2, x]
        for number, layer in enumerate(self.layers):
            found.append(torch.tanh(layer(found[-1])) * 0.5 + found[-3 if number == 3 else -2])
        return found[-1]


def test_layers_that_read_other_earlier_layers_are_no_equal_pairs():
    """One by one they are equal: what an input is inside of a program of several decides."""
    model = Earlier()
    mine, events = divided(copy.deepcopy(model), blocks=2)
    x = torch.randn(4, 8, requires_grad=True)
    assert close(gradients(mine, x), gradients(model, x))
    pieces = events[0].pieces
    assert sum(piece.runs * piece.layers for piece in pieces if piece.layers == 2) < 8
    one, single = divided(copy.deepcopy(model))
    one(x)
    assert [piece.runs for piece in single[0].pieces if piece.runs > 1] == [8]


def test_dropout_draws_other_masks_in_each_layer_of_a_program():
    model = stacks.Stack(4, lambda: stacks.Layer(0.5))
    for layer in model.layers:
        layer.load_state_dict(model.layers[0].state_dict())
    mine, events = divided(lambda x: [x := layer(x) - x for layer in model.layers], blocks=2)
    x = torch.ones(1, 400, 8, requires_grad=True)
    masks = [(y == 0).numpy().tobytes() for y in mine(x)]
    assert [piece.runs for piece in events[0].pieces] == [2]
    assert len(set(masks)) == 4


@pytest.mark.parametrize(
    ("layers", "note"), [("on", "saves the inputs of each layer"), (2, "saves the sums at the ends")]
)
def test_checkpointed_programs_of_several_layers_save_the_sums(layers, note):
    options = {"blocks": layers, "checkpoint": "blocks", "precision": "float32", "strict": True}
    explanation = explain(stacks.Stack(4), torch.randn(2, 5, 3), options=options)
    notes = [p.notes[0] for p in explanation.passes if p.name == "checkpoint_blocks" and p.notes]
    assert len(notes) == 1
    assert notes[0].startswith(note)


def test_too_few_layers_leave_the_graph_whole_and_say_so(caplog):
    mine, events = divided(stacks.Stack(5), blocks=3)
    mine(torch.randn(2, 5, 3))
    assert events[0].reason == "no 3 of its 5 equal layers repeat 2 times"
    assert "blocks=3 has no effect on a graph: no 3 of its 5 equal layers repeat 2 times" in caplog.text


@pytest.mark.parametrize("value", [1, 0, -2, 2.0, True, "2"])
def test_other_numbers_are_refused(value):
    with pytest.raises(TPUConfigurationError, match="'auto', 'on', 'off', an int >= 2"):
        CompileOptions(blocks=value)


class Wide(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 0.5 + x
        return x.sum()


@pytest.mark.parametrize(("rows", "found"), [(64, []), (280, [(4, 3), (1, 1)]), (2000, [(12, 1), (1, 1)])])
def test_auto_takes_as_few_layers_a_program_as_make_the_calls_cheap(rows, found):
    """A layer takes at least 84 us for 64 rows; a call adds 50 us."""
    mine, events = divided(Wide(12), blocks="auto")
    with torch.no_grad():
        mine(torch.randn(rows, 256))
    assert [(piece.runs, piece.layers) for piece in events[0].pieces] == found, events[0].reason


def test_what_compiles_fewest_operators_comes_first():
    assert group_sizes([(10, 32)], 3) == [2, 4, 3, 5, 6, 8, 7, 10, 9]
    assert group_sizes([(10, 5)], 3) == []
    # Twelve layers of ten operators and three of a hundred, which cannot be grouped.
    assert group_sizes([(10, 12), (100, 3)], 3) == [2, 3, 4]
    assert num_calls([(10, 12), (100, 3)], 3, layers=4) == 3


def test_division_of_a_graph_more_than_once():
    """As "auto" does: a division leaves the graph as it was."""
    found = []

    def backend(gm, inputs):
        found.append([[piece.runs for piece in divide(gm, inputs, layers).pieces] for layers in (1, 2, 1)])
        return gm.forward

    torch.compile(stacks.Stack(6), backend=backend)(torch.randn(2, 5, 3))
    assert found == [[[1, 6, 1], [1, 3, 1], [1, 6, 1]]]


def test_explain_and_pages_count_layers():
    options = {"blocks": 2, "precision": "float32"}
    found = explain(stacks.Stack(4), torch.randn(2, 5, 3), options=options)
    assert "repeated layers, compiled once: layers.0.norm (LayerNorm) x 2 (2 layers each)" in str(found)
    assert layers_sentence([(2, 16)], train=True) == (
        "All 32 layers share one forward and one backward program, 2 layers a run."
    )
    assert layers_sentence([(1, 4), (2, 3)], train=False) == "10 layers share 2 programs."


def test_paths_of_the_runs_of_several_layers():
    modules = tuple(f"layers.{i}" for i in range(12))
    assert paths_of_runs("layers.1.mlp", modules, 4) == ["layers.1.mlp", "layers.5.mlp", "layers.9.mlp"]
    assert paths_of_runs("layers.10", modules, 4) == []
    assert paths_of_runs("layers.0", modules) == list(modules)
    assert paths_of_runs("head", modules, 4) == []
