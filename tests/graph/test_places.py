"""Places: a line of the user as such, a line of a library by the module of the model."""

from __future__ import annotations

import sysconfig

import pytest
import torch

from kp_dynamo.graph.places import Place, place_of, short_line

ATTENTION = "model.layers.3.self_attn (LlamaAttention)"
SITE = sysconfig.get_paths()["purelib"]
LLAMA = f"{SITE}/transformers/models/llama/modeling_llama.py:123 in forward"
MINE = "/src/model.py:12 in forward"


@pytest.mark.parametrize(
    ("place", "text", "verbose"),
    [
        (Place(MINE, ATTENTION), f"at {MINE}", f"in {ATTENTION}, at {MINE}"),
        (Place(MINE), f"at {MINE}", f"at {MINE}"),
        (
            Place(LLAMA, ATTENTION),
            f"in {ATTENTION}",
            f"in {ATTENTION}, at transformers/models/llama/modeling_llama.py:123 in forward",
        ),
        (
            Place(LLAMA),
            "at transformers/models/llama/modeling_llama.py:123 in forward",
            "at transformers/models/llama/modeling_llama.py:123 in forward",
        ),
        (Place("module layers.0 (Linear)", "layers.0 (Linear)"), "in layers.0 (Linear)", "in layers.0 (Linear)"),
        # As a report of an earlier version has it.
        (Place("module layers.0 (Linear)"), "in layers.0 (Linear)", "in layers.0 (Linear)"),
        (Place(""), "", ""),
    ],
)
def test_a_library_is_shown_by_module_and_the_user_by_line(place, text, verbose):
    assert (place.text(), place.text(verbose=True)) == (text, verbose)


@pytest.mark.parametrize(
    ("line", "short"),
    [
        ("/usr/lib/python3/dist-packages/timm/layers/mlp.py:44 in forward", "timm/layers/mlp.py:44 in forward"),
        ("/lib/python3.11/contextlib.py:81 in inner", "contextlib.py:81 in inner"),
        ("/lib64/python3.12/site-packages/lib/python3.py:1 in f", "lib/python3.py:1 in f"),
        ("{here}/demo/model.py:51 in forward", "demo/model.py:51 in forward"),
        ("{here}/.venv/lib/python3.11/site-packages/a/b.py:5 in f", "a/b.py:5 in f"),
        ("{here}-old/model.py:51 in forward", "{here}-old/model.py:51 in forward"),
        ("m.py:1 in f: see /x/site-packages/a.py", "m.py:1 in f: see /x/site-packages/a.py"),
    ],
)
def test_a_line_is_shortened_to_its_package_or_the_working_directory(line, short, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short_line(line.format(here=tmp_path)) == short.format(here=tmp_path)


def test_a_node_has_the_line_and_the_innermost_module():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.act = torch.nn.ReLU()

        def forward(self, x):
            return self.act(x).sin()

    found = {}

    def backend(gm, _):
        found.update({n.name.split("_")[-1]: place_of(n) for n in gm.graph.nodes if n.op.startswith("call")})
        return gm

    torch._dynamo.reset()
    torch.compile(torch.nn.Sequential(Block()), backend=backend)(torch.ones(2))
    first = Block.forward.__code__.co_firstlineno + 1
    assert {p.line for p in found.values()} == {f"{__file__}:{first} in forward"}
    assert [p.module for p in found.values()] == ["0.act (ReLU)", "0 (Block)"]
