"""The text of an explanation: golden texts of real models, and of values made by hand."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from expecttest import assert_expected_inline

from kp_dynamo import clear_cache, explain
from kp_dynamo.explanation.graph_reports import (
    CaptureReport,
    DivisionReport,
    FallbackReport,
    GraphBreak,
    GraphReport,
    PassOnGraph,
    PieceReport,
)
from kp_dynamo.explanation.report_text import division_lines
from kp_dynamo.explanation.reports import Explanation
from kp_dynamo.explanation.text_layout import WIDTH
from kp_dynamo.graph.places import Place
from kp_dynamo.passes.base import PassReport

LIBRARY = """
import torch

class Gate(torch.nn.Module):
    def forward(self, x):
        return torch.special.erfcx(x.sin()) + x
"""

MODEL = """
import torch
from gates.layers.gate import Gate

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4), Gate()) for _ in range(4)))

    def forward(self, x):
        x = self.layers(x)
        torch._dynamo.graph_break()
        return torch.special.erfcx(x.sin())
"""


@dataclass(frozen=True)
class RefuseSines:
    name = "refuse_sines"

    def __call__(self, gm):
        sines = [n.name for n in gm.graph.nodes if n.target is torch.ops.aten.sin.default]
        return PassReport(self.name, 0, tuple((name, f"{name} stays") for name in sines))


OPTIONS = {"extra_passes": [RefuseSines()]}


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A model of the working directory, two graphs in training, with layers of a package installed below it."""
    installed = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages"
    (installed / "gates" / "layers").mkdir(parents=True)
    (installed / "gates" / "layers" / "gate.py").write_text(LIBRARY)
    (tmp_path / "broken_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    clear_cache()
    yield importlib.import_module("broken_model").Broken()
    for name in ("gates", "gates.layers", "gates.layers.gate", "broken_model"):
        sys.modules.pop(name, None)


def renumbered(text):
    """The text with the captures counted from 1; a process counts them all."""
    numbers = dict.fromkeys(re.findall(r"\b(\d+)(?=\.joint|\.forward)", text))
    new = {old: str(i) for i, old in enumerate(numbers, start=1)}
    return re.sub(r"\b\d+(?=\.(?:joint|forward|backward)\b)", lambda m: new[m[0]], text)


def part(text, title):
    """One section of a text."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i, line in enumerate(lines[start + 1 :], start + 1) if not line.startswith(" ")), len(lines))
    return "\n".join(lines[start:end])


# Dynamo (2.9) reads `.grad` of a graph's result at a graph break; it hides the warning, except from `-W error`.
READS_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@READS_GRAD
def test_graphs_of_a_broken_model_in_training_share_a_row_for_each_pass(broken):
    text = renumbered(str(explain(broken, torch.randn(2, 4), options=OPTIONS)))
    assert_expected_inline(
        part(text, "graph breaks"),
        """\
graph breaks: 1
  broken_model.py:12 in forward: Call to `torch._dynamo.graph_break()`
    torch._dynamo.graph_break()""",
    )
    assert_expected_inline(
        part(text, "passes"),
        """\
passes: 4, and 12 that found nothing to do
  pass             graphs  rewrote  refused
  fold_constants        2       20        0
  cast_bf16             1        7        4
    refused 4: sin reads it as an angle, modulo a period
      in layers.0.0 (Linear), layers.1.0 (Linear), layers.2.0 (Linear), and 1 more
  recompute_casts       1       14        0
  refuse_sines          2        0        5
    refused 5: sin stays
      in layers.0.1 (Gate), layers.1.1 (Gate), layers.2.1 (Gate), and 2 more""",
    )
    assert_expected_inline(
        part(text, "operators on the CPU"),
        """\
operators on the CPU: 3
  graph       operator                    bytes moved
  1.forward   aten.special_erfcx.default          256
    in layers.0.1 (Gate), layers.1.1 (Gate), layers.2.1 (Gate), and 1 more
  1.backward  aten.special_erfcx.default          256
    in layers.3.1 (Gate), layers.2.1 (Gate), layers.1.1 (Gate), and 1 more
  2.forward   aten.special_erfcx.default           64
    at broken_model.py:13 in forward""",
    )
    assert "site-packages" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


@READS_GRAD
def test_verbose_shows_every_graph_every_refusal_and_the_files_of_a_library(broken):
    text = renumbered(explain(broken, torch.randn(2, 4), options=OPTIONS).text(verbose=True))
    assert_expected_inline(
        part(text, "passes"),
        """\
passes: 32
  graph       pass                       rewrote  refused
  1.joint     fold_constants                  16        0
  1.joint     rewrite_attention                0        0
  1.joint     fuse_linear_cross_entropy        0        0
  1.joint     fuse_linear_activation           0        0
  1.joint     rewrite_patch_convolution        0        0
  1.joint     rewrite_stem_convolution         0        0
  1.joint     cast_bf16                        7        4
    refused addmm: sin reads it as an angle, modulo a period
      in layers.0.0 (Linear), at broken_model.py:11 in forward
    refused addmm_1: sin_1 reads it as an angle, modulo a period
      in layers.1.0 (Linear), at broken_model.py:11 in forward
    refused addmm_2: sin_2 reads it as an angle, modulo a period
      in layers.2.0 (Linear), at broken_model.py:11 in forward
    refused addmm_3: sin_3 reads it as an angle, modulo a period
      in layers.3.0 (Linear), at broken_model.py:11 in forward
  1.joint     fold_views                       0        0
  1.joint     fold_casts                       0        0
  1.joint     recompute_activations            0        0
  1.joint     recompute_casts                 14        0
  1.joint     checkpoint_attention             0        0
  1.joint     checkpoint_auto                  0        0
  1.joint     refuse_sines                     0        4
    refused sin: sin stays
      in layers.0.1 (Gate), at gates/layers/gate.py:6 in forward
    refused sin_1: sin_1 stays
      in layers.1.1 (Gate), at gates/layers/gate.py:6 in forward
    refused sin_2: sin_2 stays
      in layers.2.1 (Gate), at gates/layers/gate.py:6 in forward
    refused sin_3: sin_3 stays
      in layers.3.1 (Gate), at gates/layers/gate.py:6 in forward
  1.backward  gate_recomputation               0        0
  1.backward  gate_weight_gradients            0        0
  2.joint     fold_constants                   4        0
  2.joint     rewrite_attention                0        0
  2.joint     fuse_linear_cross_entropy        0        0
  2.joint     fuse_linear_activation           0        0
  2.joint     rewrite_patch_convolution        0        0
  2.joint     rewrite_stem_convolution         0        0
  2.joint     cast_bf16                        0        0
  2.joint     fold_views                       0        0
  2.joint     fold_casts                       0        0
  2.joint     recompute_activations            0        0
  2.joint     recompute_casts                  0        0
  2.joint     checkpoint_attention             0        0
  2.joint     checkpoint_auto                  0        0
  2.joint     refuse_sines                     0        1
    refused sin: sin stays
      at broken_model.py:13 in forward
  2.backward  gate_recomputation               0        0
  2.backward  gate_weight_gradients            0        0""",
    )
    assert_expected_inline(
        part(text, "operators on the CPU"),
        """\
operators on the CPU: 3
  graph       operator                    bytes moved
  1.forward   aten.special_erfcx.default          256
    in layers.0.1 (Gate), layers.1.1 (Gate), layers.2.1 (Gate), layers.3.1 (Gate), at gates/layers/gate.py:6
        in forward
  1.backward  aten.special_erfcx.default          256
    in layers.3.1 (Gate), layers.2.1 (Gate), layers.1.1 (Gate), layers.0.1 (Gate), at gates/layers/gate.py:6
        in forward
  2.forward   aten.special_erfcx.default           64
    at broken_model.py:13 in forward""",
    )
    assert "site-packages" not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_transformers_model_is_shown_by_its_modules():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        explanation = explain(model, torch.zeros(1, 8, dtype=torch.int64))
    text = part(str(explanation), "passes")
    assert_expected_inline(
        text,
        """\
passes: 5, and 8 that found nothing to do
  pass                    graphs  rewrote  refused
  fold_constants               1        9        0
  rewrite_attention            1        2        0
  fuse_linear_activation       1        2        0
  cast_bf16                    1       17        1
    refused 1: view_2 is computed from integers (positions?), which bfloat16 represents only up to 256
      in model.rotary_emb (LlamaRotaryEmbedding)
  fold_views                   1        4        0""",
    )
    verbose = explanation.text(verbose=True)
    assert "at transformers/models/llama/modeling_llama.py:" in verbose
    assert "site-packages" not in str(explanation) + verbose


EXPLANATION = Explanation(
    graph_breaks=(GraphBreak("model.py:3 in forward", "print(x)", "builtin print\n  Hint: do not"),),
    captures=(CaptureReport(1, "a1", False, "the cache is empty", 1.5), CaptureReport(None, "a1", True, "", 0.0)),
    divisions=(),
    passes=(
        PassOnGraph("1.joint", "cast_bf16", 2, (("exp", "it is sensitive"),)),
        PassOnGraph("1.joint", "fold_casts", 0, ()),
        PassOnGraph("2.joint", "cast_bf16", 0, (("exp_3", "it is sensitive"),), (), (Place("model.py:4 in forward"),)),
        PassOnGraph("2.joint", "fold_casts", 0, ()),
    ),
    graphs=(
        GraphReport("1.joint", "b2", False, "the cache is empty", 9, {"int64 -> bool": 1}, 1, {"xla": 0.25}),
        GraphReport("2.joint", "b2", True, "", 9, {}, 0, {}),
    ),
    fallbacks=(FallbackReport("1.joint", "aten.sort", "model.py:4 in forward", 64, ("head (Head)",)),),
    seconds={"dynamo": 0.5, "aot": 1.0},
)


def test_the_text_says_it_all():
    assert_expected_inline(
        EXPLANATION.text(),
        """\
graph breaks: 1
  model.py:3 in forward: builtin print
    print(x)
graphs captured by Dynamo: 2
  1: 1.50 s, key a1, not in the cache: the cache is empty
  equal to an earlier one: 0.00 s, key a1, in the cache
passes: 1, and 1 that found nothing to do
  pass       graphs  rewrote  refused
  cast_bf16       2        2        2
    refused 2: it is sensitive
      at model.py:4 in forward
graphs lowered: 2
  graph    operators  programs  xla s
  1.joint          9         1   0.25
    key b2, not in the cache: the cache is empty
    casts: 1 x int64 -> bool
  2.joint          9         0      -
    key b2, in the cache
XLA programs: 1
compile cache: 1 hit, 1 miss
operators on the CPU: 1
  graph    operator   bytes moved
  1.joint  aten.sort           64
    at model.py:4 in forward
seconds: dynamo 0.50, aot 1.00""",
    )
    assert str(EXPLANATION) == EXPLANATION.text()


def test_notes_are_shown_with_their_graphs():
    notes = ("peak 3.0 MiB",)
    passes = tuple(PassOnGraph(f"{i}.joint", "checkpoint_auto", 0, (), notes) for i in (1, 2))
    text = part(replace(EXPLANATION, passes=passes).text(), "passes")
    assert_expected_inline(
        text,
        """\
passes: 1
  pass             graphs  rewrote  refused
  checkpoint_auto       2        0        0
    1.joint, 2.joint: peak 3.0 MiB""",
    )


def test_reasons_of_other_nodes_are_the_same_and_the_first_places_are_named():
    places = tuple(Place("", f"layers.{i} (Layer)") for i in range(5))
    refused = tuple((f"mm_{i}", f"view_{i} has 3 dims") for i in range(5))
    text = part(replace(EXPLANATION, passes=(PassOnGraph("1.joint", "fold", 0, refused, (), places),)).text(), "passes")
    assert_expected_inline(
        text,
        """\
passes: 1
  pass  graphs  rewrote  refused
  fold       1        0        5
    refused 5: view_0 has 3 dims
      in layers.0 (Layer), layers.1 (Layer), layers.2 (Layer), and 2 more""",
    )


def test_an_explanation_of_nothing_has_no_tables():
    assert_expected_inline(
        Explanation((), (), (), (), (), (), {"dynamo": 0.5}).text(),
        """\
graph breaks: none
graphs captured by Dynamo: none
passes: none
graphs lowered: none
XLA programs: 0
compile cache: 0 hits, 0 misses
operators on the CPU: none
seconds: dynamo 0.50""",
    )


def test_repeated_layers_are_named_with_their_runs():
    pieces = (PieceReport(1, "", 3, 1), PieceReport(2, "layers.0 (Block)", 9, 6), PieceReport(None, "", 2, 4))
    divisions = (DivisionReport(pieces, ""), DivisionReport((), "it calls whole modules"))
    assert list(division_lines(divisions)) == ["repeated layers, compiled once: layers.0 (Block) x 6, layer x 4"]
    assert list(division_lines(divisions, verbose=True))[1] == (
        "repeated layers: none compiled once; it calls whole modules"
    )
