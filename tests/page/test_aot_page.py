"""The page of aot: the answer in words, what is wrong and its cure, time by module, pictures."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace

import pytest

from kp_dynamo.aot.live_values import LiveValues
from kp_dynamo.aot.memory_line import ProgramCall
from kp_dynamo.aot.module_times import of_all_layers
from kp_dynamo.aot.program_report import ModuleTime
from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.slice_report import CollectiveReport, SliceReport
from kp_dynamo.explanation.subject import Subject
from tests.aot.test_report import DETAILED, PROGRAM, REPORT, SMALL, WITH_CALL
from tests.aot.test_report_of_blocks import BLOCKS, LAYERS
from tests.page.test_render import BAD, check

PARTS = (
    ModuleTime("model.layers.0", "Block", 0.0, 0.0, 0.0),
    ModuleTime("model.layers.0.attn", "Attention", 0.015, 0.01, 0.001),
    ModuleTime("model.layers.0.mlp", "Mlp", 0.015, 0.001, 0.012),
    ModuleTime("", "", 0.01, 0.0, 0.0),
)
LIVE = (
    LiveValues("activations", "model.layers.*.attn", 32, 48 * 2**20),
    LiveValues("parameters", "model.layers.*.mlp", 32, 10 * 2**20),
    *(LiveValues("parameters", f"model.norm_{i}", 1, 2**14) for i in range(20)),
    LiveValues("inputs", "", 1, 2**10),
)
DEEP = replace(
    BLOCKS, programs=tuple(replace(p, by_module=PARTS) for p in BLOCKS.programs), train=True, live_at_peak=LIVE
)
GATHER = CollectiveReport("all-gather", "data", 8, 2**20, 0.05, 0.03)
CHIPS = replace(
    REPORT,
    programs=(replace(PROGRAM, collectives=(GATHER,), by_module=PARTS),),
    slice=SliceReport("4x4", 16, 2, "data=16", "fsdp", ("head.weight float32[1000, 128256]",)),
)
BROKEN = replace(
    DETAILED,
    programs=(replace(PROGRAM, by_module=(ModuleTime(BAD, BAD, 0.04, 0.0, 0.0),)),),
    memory_budget_bytes=2**20,
    graph_breaks=(f"model.py:7 in {BAD}: it is {BAD}",),
    train=True,
)
MANY = replace(
    REPORT,
    programs=tuple(replace(PROGRAM, name=f"{i}.forward", flops=(i + 1) * 1e7) for i in range(40)),
    calls=tuple(ProgramCall(f"{i}.forward", i * 2**18) for i in range(40)),
)
REPORTS = {"deep": DEEP, "chips": CHIPS, "broken": BROKEN, "many": MANY, "calls": WITH_CALL, "small": SMALL}


PAGES: dict[int, str] = {}


def shown(report: AotReport) -> str:
    """The page of a report of this file, made once."""
    if id(report) not in PAGES:
        PAGES[id(report)] = report.to_html()
    return PAGES[id(report)]


def headline(report: AotReport) -> str:
    return re.search("<h1>(.*?)</h1>", shown(report))[1]


def problems(report: AotReport) -> list[tuple[str, str]]:
    found = re.findall(r'class="problem (\w+)"><p class="what"><span class="tag">\w+</span>(.*?)</p>', shown(report))
    return [(level, what) for level, what in found]


@pytest.mark.parametrize("name", REPORTS)
def test_every_page_is_well_formed_small_and_escaped(name):
    page = REPORTS[name].to_html(verbose=True)
    check(page)
    assert len(page.encode()) < 2**20
    assert BAD not in page


def test_the_model_its_inputs_and_the_date_are_named():
    named = replace(REPORT, subject=Subject(BAD, (f"x['{BAD}']: int64[8, 512]",)))
    page = named.to_html(date="2026-03-01")
    check(page)
    assert BAD not in page
    assert "]: int64[8, 512] &middot; 2026-03-01</p>" in page
    assert AotReport.from_dict(json.loads(json.dumps(named.to_dict()))) == named
    assert "&middot;" not in shown(REPORT)  # written by an earlier version, and without a date


def test_equal_reports_give_equal_pages():
    assert replace(BROKEN).to_html() == shown(BROKEN)


def test_the_headline_is_the_answer():
    assert headline(REPORT) == (
        "Inference takes 40 us on one v5e, 25% of its peak; 1.9 MiB of 13.4 GiB; USD 0.052 a billion tokens."
    )
    assert headline(DEEP).startswith("A training step takes 3.92 ms on one v5e")
    assert headline(DEEP).endswith("All 32 layers share one forward and one backward program.")
    assert "on 16 v5e, " in headline(CHIPS)
    assert "it does NOT fit: 1.9 of 1.0 MiB" in headline(BROKEN)
    assert headline(replace(REPORT, num_tokens=0)).endswith("; USD 13.33 a billion steps.")


def test_what_is_wrong_is_said_the_worst_first():
    found = problems(BROKEN)
    assert [level for level, _ in found] == ["stop", "slow", "slow", "note", "note"]
    assert found[0][1] == "The step does not fit a v5e: its peak is 1.9 of 1.0 MiB that it may use."
    assert "options={&#34;checkpoint&#34;: &#34;blocks&#34;}" in shown(BROKEN)
    assert found[2][1] == "aten.sort runs on the CPU."
    assert "<code>model.norm (LlamaRMSNorm)</code>" in shown(BROKEN)
    assert problems(CHIPS)[:2] == [
        ("slow", "Each chip waits 30 us of a step for its links, 43% of it."),
        ("slow", "Whole on every chip, and larger than 64 MiB: 1 tensor."),
    ]


def test_what_a_picture_leaves_out_is_said():
    page = shown(MANY)
    assert page.count("The 24 longest of 40 programs are shown.") == 2
    assert "The 10 of 40 that take most of the step have names." in page
    assert page.count("<summary>all 40 programs</summary>") == 2
    assert "longest of" not in shown(DEEP)


def test_estimates_that_are_far_apart_say_which_to_believe():
    [apart, *_] = problems(SMALL)
    assert apart[1] == "Two estimates of the time are far apart: 2.1 us modelled, 86.3 us by the compiler&#39;s cycles."
    assert "Cure: believe the modelled time" in shown(SMALL)


TREE = [
    "the model 1.98 ms 75% 2.3x memory",
    "model.layers.0 to 31 x 32 Block 1.98 ms 75% 2.3x memory",
    "attn Attention 990 us 38% 1.5x matrix unit",
    "mlp Mlp 990 us 38% 1.3x memory",
    "outside of submodules 660 us 25% - nothing known",
]


def tree(report: AotReport) -> list[str]:
    rows = re.findall(r'class="row">(.*?)(?:</summary>|</div>)', shown(report), re.DOTALL)
    return [" ".join(re.sub("<[^>]*>", " ", row).split()) for row in rows]


def test_all_runs_of_a_repeated_layer_are_one_branch():
    assert tree(DEEP) == TREE
    assert tree(CHIPS)[-1] == "waiting for other chips 30 us 43% 1.0x links"
    assert tree(REPORT) == []  # written by an earlier version


def test_the_program_of_a_layer_counts_for_each_of_its_modules():
    rows = list(of_all_layers(PARTS, LAYERS, 32))
    assert {count for row, count in rows if row.path} == {1}
    assert {row.path for row, _ in rows} == {
        "",
        *LAYERS,
        *(f"{name}.{part}" for name in LAYERS for part in ("attn", "mlp")),
    }
    assert sum(row.modelled_ms * count for row, count in rows) == pytest.approx(32 * 0.04)


def test_runs_beyond_the_known_modules_keep_their_time():
    rows = list(of_all_layers(PARTS, LAYERS[:2], 3))
    assert sum(row.modelled_ms * count for row, count in rows) == pytest.approx(3 * 0.04)
    other = ModuleTime("model.layers.01", "Block", 1.0, 0.0, 0.0)  # not below model.layers.0
    assert list(of_all_layers([other], LAYERS, 32)) == [(other, 32)]


def test_time_by_module_survives_json():
    assert AotReport.from_dict(json.loads(json.dumps(DEEP.to_dict()))) == DEEP


def section(report: AotReport, name: str) -> str:
    """The text of a section, in one line."""
    page = shown(report)
    found = page[page.index(f'<section id="{name}">') :]
    return " ".join(re.sub("<[^>]*>", " ", found[: found.index("</section>")]).split())


def test_what_lives_at_the_peak_is_told_by_module_and_by_whom():
    text = section(DEEP, "memory")
    assert "48.0 MiB activations, 10.3 MiB parameters, 1.0 KiB inputs, 512.0 KiB results" in text
    assert "activations model.layers.*.attn x 32 48.0 MiB 75%" in text
    assert "7 smaller rows" in text
    assert "temporaries 2.forward 256.0 KiB" in text
    assert "by module: parameters, activations and gradients together module bytes share model.layers.*.attn 48" in text
    assert "counted from the graphs, without padding: 58.3 MiB together. The compiler allocates 63.0 MiB" in text
    assert "at the peak" not in section(REPORT, "memory")  # written by an earlier version


def test_the_page_says_what_was_measured_with_its_error_and_the_command():
    text = section(REPORT, "trust")
    assert "Matmuls: 0.95 to 1.05 of the measured time." in text
    assert "jnp.matmul bf16 8192^3, v5e 6.047 ms 1.05 source: jax pallas matmul notebook" in text
    assert "In the repository, python -m bench.calibration compiles these matmuls again" in text


def test_each_compile_time_names_its_clock():
    report = replace(REPORT, seconds={"dynamo": 0.1, "passes": 0.3, "tpu": 50.0, "total": 30.0})
    text = section(report, "seconds")
    assert "stage clock time share" in text
    assert "passes wall, this process 300 ms 1%" in text
    assert "the TPU's compiler CPU, other processes 50 s -" in html.unescape(text)
    assert "waiting for the TPU's compiler, and the rest wall, this process 29.6 s 99%" in html.unescape(text)
    assert "From the call to the report: 30 s of wall time." in text
    assert "Longest on the wall clock: waiting for" in text


def test_a_notebook_shows_it():
    assert REPORT._repr_html_().startswith('<iframe sandbox=""')


def lead(report: AotReport) -> str:
    return re.search('<p class="lead">(.*?)</p>', shown(report))[1]


def test_what_limits_the_step_is_said_below_the_headline():
    assert lead(DEEP) == (
        "The matrix unit limits the largest part of the step: 38% of the time is in modules that it bounds; 38% by the "
        "memory, 25% by nothing known."
    )
    assert lead(CHIPS).startswith(
        "The links limit the largest part of the step: a chip waits for them 43% of the time; 21% by the matrix unit"
    )
    assert lead(REPORT).startswith("No bound explains most of the step: 100% of the time is in programs")
