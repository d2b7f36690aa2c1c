"""The page of an explanation: what is wrong comes first, with the user's line and the cure."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import asdict, replace

import torch

from kp_dynamo import clear_cache, explain
from kp_dynamo.cli.main import OK, main
from kp_dynamo.config.options import CompileOptions
from kp_dynamo.explanation.graph_reports import (
    CaptureReport,
    DivisionReport,
    FallbackReport,
    GraphBreak,
    GraphReport,
    PassOnGraph,
    PieceReport,
    UncompiledFrame,
    WholeTensor,
    pass_from_dict,
)  # fmt: skip
from kp_dynamo.explanation.reports import Explanation
from kp_dynamo.graph.edit_example import EditExample
from kp_dynamo.graph.places import Place
from kp_dynamo.runtime.events import GraphTransformed
from kp_dynamo.session import Session
from tests.page.test_render import BAD, check

REASON = "builtin print\n  Explanation: it writes.\n  Hint: Remove the call.\n  Developer debug context: none"
LAYERS = tuple(f"layers.{i}" for i in range(32))
FULL = Explanation(
    graph_breaks=(GraphBreak("model.py:12 in forward", "print(x)", REASON),),
    captures=(CaptureReport(1, "abc", False, "input 0", 1.5, ("batch['input_ids'] is [8, 513], was [8, 512]",)),),
    divisions=(DivisionReport((PieceReport(2, "layers.0 (Block)", 20, 32, LAYERS),), ""),),
    passes=(
        PassOnGraph(
            "1.joint",
            "cast_bf16",
            3,
            (("mm", f"it is {BAD}"),),
            ("a note",),
            (Place("", f"{BAD} (Linear)"),),
            example=EditExample(
                Place("model.py:9 in forward"),
                ("mm: f32[2, 8] = aten.mm(x, w)",),
                ("cast: bf16[2, 4] = aten._to_copy(x)", f"mm: bf16[2, 8] = aten.mm(cast, {BAD})"),
                3,
            ),
        ),
        PassOnGraph("1.joint", "fold_views", 0, ()),
    ),
    graphs=(
        GraphReport("1.forward", "def", False, "the cache is empty", 9, {"float32 -> bfloat16": 4}, 1, {"xla": 2.0}),
    ),
    fallbacks=(
        FallbackReport("1.forward", "aten.special_erfcx.default", "model.py:14 in forward", 2**20),
        FallbackReport("1.backward", "aten.special_erfcx.default", "model.py:14 in forward", 2**20),
    ),
    seconds={"dynamo": 0.5, "xla": 2.0},
    uncompiled=(UncompiledFrame("model.py:20 in odd", "it is a generator"),),
    versions={"torch": "2.9.1"},
)
PLAIN = replace(FULL, graph_breaks=(), fallbacks=(), uncompiled=(), passes=(), captures=(), divisions=())


def headline(page: str) -> str:
    return re.search("<h1>(.*?)</h1>", page)[1]


def test_the_headline_says_what_happened():
    assert headline(FULL.to_html()) == (
        "1 graph became 1 program in 2.5 s of compiling. 1 function is not compiled, 1 graph break, 2 operators on "
        "the CPU, 1 recompilation for other inputs. All 32 layers share one program."
    )
    assert headline(PLAIN.to_html()).endswith("No graph breaks, and nothing runs on the CPU.")


def test_backwards_are_counted_apart():
    both = tuple(replace(FULL.graphs[0], name=f"{n}.{kind}") for n in (1, 2) for kind in ("forward", "backward"))
    assert headline(replace(PLAIN, graphs=both).to_html()).startswith("2 graphs and 2 backwards became 4 programs in")


def test_each_problem_has_its_line_and_its_cure_and_the_worst_is_first():
    page = FULL.to_html()
    check(page)
    levels = re.findall(r'<li class="problem (\w+)">', page)
    assert levels == ["stop", "slow", "slow", "slow", "note"]
    for text in ("model.py:20 in odd", "model.py:12 in forward", "model.py:14 in forward", "<pre>print(x)</pre>"):
        assert text in page
    assert "Cure: Remove the call." in page  # Dynamo's own hint
    assert "moves 2.0 MiB in a step" in page
    assert "batch[&#39;input_ids&#39;] is [8, 513], was [8, 512]" in page
    assert "pad to one size, or use buckets" in page


def test_nothing_wrong_is_said():
    page = PLAIN.to_html()
    check(page)
    assert "Nothing found." in page


def test_a_large_tensor_that_every_device_holds_is_a_note():
    tensor = WholeTensor("head.weight", "float32", (32000, 4096), 32000 * 4096 * 4)
    page = replace(PLAIN, whole=(tensor,)).to_html()
    check(page)
    assert re.findall(r'<li class="problem (\w+)">', page) == ["note"]
    assert "Every device holds all of head.weight, float32[32000, 4096]: 500" in page


def test_a_module_named_script_is_text():
    page = FULL.to_html()
    assert BAD not in page
    assert "&lt;script&gt;" in page


def test_a_deep_model_stays_small():
    graphs = tuple(replace(FULL.graphs[0], name=f"{i}.forward", why_missed="x" * 400) for i in range(64))
    passes = tuple(replace(FULL.passes[0], graph=f"{i}.joint") for i in range(64 * 14))
    page = replace(FULL, graphs=graphs, passes=passes).to_html(verbose=True)
    check(page)
    assert len(page.encode()) < 2**20


def first(batch):
    return batch["input_ids"].float().sin().sum() + batch["mask"]


def test_a_miss_names_the_input_as_the_code_does():
    clear_cache()

    def batch(length):
        return {"input_ids": torch.ones(8, length, dtype=torch.long), "mask": torch.ones(())}

    torch.compile(first, backend="kp_tpu")(batch(16))
    found = explain(first, batch(17))
    assert found.captures[0].changes == ("batch['input_ids'] is [8, 17], was [8, 16]",)
    assert "batch['input_ids'] is [8, 17], was [8, 16]" in str(found)
    assert found.versions["torch"] == torch.__version__.split("+")[0]
    check(found.to_html())


def test_the_command_writes_the_page_beside_the_text(tmp_path, capsys):
    (tmp_path / "m.py").write_text("import torch\ndef make(): return torch.nn.Linear(2, 2), (torch.ones(1, 2),)\n")
    assert main(["explain", f"{tmp_path / 'm.py'}:make", "--html", str(tmp_path / "a.html")]) == OK
    page = (tmp_path / "a.html").read_text()
    check(page)
    assert f"Linear &middot; input: float32[1, 2] &middot; {datetime.date.today().isoformat()}</p>" in page
    assert "graphs captured by Dynamo" in capsys.readouterr().out


def test_a_branch_on_a_value_is_said_in_words():
    reason = "generic_jump TensorVariable()"
    page = replace(FULL, graph_breaks=(GraphBreak("model.py:3 in forward", "if x.sum() > 0:", reason),)).to_html()
    assert "Graph break: a branch depends on the values of a tensor." in page
    assert "choose with torch.where" in page


def test_graphs_that_are_compiled_again_for_one_reason_are_one_problem():
    one, other = FULL.captures[0], replace(FULL.captures[0], number=2, seconds=0.5)
    page = replace(FULL, captures=(one, other)).to_html()
    assert page.count("Compiled again: ") == 1
    assert "Compiled again: 2 graphs, 2.0 s: batch[" in page


def test_a_pass_shows_an_example_before_and_after_side_by_side():
    page = FULL.to_html()
    passes = page[page.index('id="passes"') :]
    shown = passes[passes.index("cast_bf16, for example at model.py:9 in forward") :]
    assert shown.index("before") < shown.index("mm: f32[2, 8] = aten.mm(x, w)") < shown.index("after")
    assert shown.index("after") < shown.index("cast: bf16[2, 4] = aten._to_copy(x)")
    assert "3 more operators of the same edit are left out." in shown
    assert "for example" not in PLAIN.to_html()


def test_explain_has_one_example_of_each_pass_that_changed_a_graph():
    def doubled(x, w):
        y = torch.mm(x, w).exp()
        torch._dynamo.graph_break()
        return torch.mm(y, w).exp().exp()

    found = explain(doubled, torch.randn(4, 8), torch.randn(8, 8))
    casts = [done for done in found.passes if done.name == "cast_bf16"]
    assert [bool(done.rewritten) for done in casts] == [True, True]
    assert [done.example is not None for done in casts] == [True, False]
    assert any("aten.mm" in line for line in casts[0].example.before)
    assert any("bf16[4, 8] = aten._to_copy" in line for line in casts[0].example.after)
    assert casts[0].example.place.line.startswith(__file__)
    assert found.to_dict()["passes"] != []
    for done in found.passes:
        assert pass_from_dict(json.loads(json.dumps(asdict(done)))) == done


def test_a_session_without_a_report_makes_no_examples():
    reports = []

    def observe(event):
        if isinstance(event, GraphTransformed):
            reports.extend(event.reports)

    with torch.no_grad():
        backend = Session(observe=observe).as_backend(CompileOptions())
        torch.compile(lambda x: torch.mm(x, x).exp(), backend=backend)(torch.randn(4, 4))
    assert any(report.rewritten for report in reports)
    assert all(report.example is None for report in reports)
