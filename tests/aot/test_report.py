"""The report in its forms: text, JSON, page, and two of them compared."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from expecttest import assert_expected_inline

from kp_dynamo.aot.difference import compare, read_report
from kp_dynamo.aot.program_report import CustomCallReport, FusionReport, Origin, ProgramReport
from kp_dynamo.aot.report import SCHEMA, AotReport
from kp_dynamo.exceptions import TPUConfigurationError, TPUNotAvailableError
from kp_dynamo.explanation.graph_reports import FallbackReport, PassOnGraph
from kp_dynamo.graph.places import Place
from tests.page.test_render import check

FUSION = FusionReport("fusion.1", "matmul", 1, 1500, 0.001, 4096, (Origin("aten.mm.default", "model.py:3 in forward"),))
PROGRAM = ProgramReport(
    name="1.inference", runs=1, compile_s=0.5,
    argument_bytes=2**20, output_bytes=2**19, temp_bytes=2**18, alias_bytes=0,
    generated_code_bytes=2**17, flops=2e9, bytes=3e6, hbm_bytes=2_000_000, model_flops=2_000_000_000, cycles=30_000,
    estimated_ms=0.02,
    modelled_ms=0.04, unknown=("custom-call.1",), ms_by_kind={"matmul": 0.03, "copy": 0.01}, dearest=(FUSION,),
    num_copies=1,
)  # fmt: skip
REPORT = AotReport(
    target="v5e", backend="kp_tpu", options={"level": "aggressive"}, train=False, matmul_precision="highest",
    programs=(PROGRAM,), memory_budget_bytes=14.4e9, seconds={"dynamo": 0.1, "tpu": 0.5, "total": 0.7},
    peak_host_mib=500.0, passes=("1.inference cast_bf16: rewrote 3, refused 0",), graph_breaks=(), fallbacks=(),
    num_tokens=256, versions={"libtpu": "0.0.21"},
)  # fmt: skip


def test_the_text_has_known_and_unknown_figures():
    text = str(REPORT)
    assert "modelled        0.040 ms    (by the compiler's cycles 0.020 ms)" in text
    assert "memory: fits. The step takes 1.9 MiB at its peak, its largest program 1.9 MiB; allowed are 13733" in text
    assert "aten.mm.default at model.py:3 in forward" in text
    assert "no estimate from the compiler, counted as no cycles: 1\n  1.inference custom-call.1" in text
    assert "no chip ran this program" in text.splitlines()[-1]


def test_the_report_names_the_flags_of_libtpu():
    flags = "--xla_tpu_scoped_vmem_limit_kib=65536"
    report = replace(REPORT, libtpu_flags=flags)
    assert f"flags of libtpu: {flags}\n" in str(report)
    assert flags in report.to_html()
    assert AotReport.from_dict(report.to_dict()).libtpu_flags == flags
    assert "flags of libtpu" not in str(REPORT)
    before = {name: value for name, value in REPORT.to_dict().items() if name != "libtpu_flags"}
    assert AotReport.from_dict(before).libtpu_flags == ""


SMALL = replace(REPORT, programs=(replace(PROGRAM, modelled_ms=0.0021, estimated_ms=0.0863, model_flops=40_000),))


def test_a_small_step_is_told_in_microseconds_and_per_billion():
    text = str(SMALL)
    assert "modelled        2.100 us    (by the compiler's cycles 86.300 us)" in text
    assert "lower bounds    0.0002 us for the matmuls" in text
    assert "modelled us  calls us  cycles us" in text
    assert "1.0000 us" in text  # the most expensive operation
    assert "1.20 USD an hour: 0.7 USD per billion steps, 0.00273 USD per billion tokens" in text
    assert "modelled us of a step" in SMALL.to_html()
    assert SMALL.to_dict()["totals"]["modelled_ms"] == 0.0021
    assert "0.01 USD per million steps, 0.0521 USD per billion tokens" in str(REPORT)


def test_estimates_that_are_far_apart_come_with_the_one_to_believe():
    gathers = replace(REPORT, programs=(replace(PROGRAM, estimated_ms=0.001),))
    assert "believe the modelled time: on a chip, elementwise operations on data in vector memory took" in str(SMALL)
    assert "believe the modelled time: gathers, relayouts and custom calls have no cycles" in str(gathers)
    assert "believe" not in str(REPORT)


CALL = CustomCallReport("custom-call.1", 1, 2_000_000_000, 2**20, 0.0102, (Origin("kp.flash_attention.default", ""),))
WITH_CALL = replace(REPORT, programs=(replace(PROGRAM, runs=2, custom_calls=(CALL,)),))


def test_what_custom_calls_take_at_least_is_said_in_every_form():
    text = str(WITH_CALL)
    assert "custom calls    0.020 ms of the modelled time, by their rooflines: they take at least that" in text
    assert (
        "0.0204 ms  4.00 GFLOP, 2.0 MiB to and from the chip's memory, 1.inference custom-call.1, 2 times a step"
        in text
    )
    content = json.loads(json.dumps(WITH_CALL.to_dict()))
    assert content["totals"]["custom_call_ms"] == 2 * content["programs"][0]["custom_call_ms"] == 0.0204
    assert AotReport.from_dict(content) == WITH_CALL
    assert "Custom calls take at least that long" in WITH_CALL.to_html()
    assert "rooflines of custom calls: 0.000 -> 0.020 ms of modelled_ms" in str(compare(REPORT, WITH_CALL))


def test_a_custom_call_that_declares_nothing_says_so():
    silent = replace(PROGRAM, custom_calls=(replace(CALL, flops=None),))
    assert "0.0102 ms  declares no FLOPs, 1.0 MiB" in str(replace(REPORT, programs=(silent,)))
    assert "custom calls  " not in str(REPORT)


LIBRARY = "/env/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py:67 in forward"
NORMS = tuple(Origin(f"aten.{op}.Tensor", LIBRARY, "model.norm (LlamaRMSNorm)") for op in ("mul", "add"))
DETAILED = replace(
    REPORT,
    programs=(replace(PROGRAM, dearest=(replace(FUSION, origins=(*FUSION.origins, *NORMS)),)),),
    passes=("as earlier versions say it",),
    pass_reports=(
        PassOnGraph("1.joint", "cast_bf16", 3, (("mm", "it is sensitive"),), (), (Place(LIBRARY, "head (Linear)"),)),
        PassOnGraph("2.joint", "cast_bf16", 2, ()),
        PassOnGraph("2.joint", "fold_views", 0, ()),
    ),
    graph_breaks=(f"{LIBRARY}: builtin print",),
    fallbacks=(f"1.joint aten.sort at {LIBRARY}",),
    fallback_reports=(FallbackReport("1.joint", "aten.sort", LIBRARY, 0, ("model.norm (LlamaRMSNorm)",)),),
)


def from_dearest_to_passes(text):
    lines = text.splitlines()
    first = lines.index("most expensive operations")
    return "\n".join(lines[first : lines.index("", first)])


def test_a_pass_is_one_row_and_a_library_is_shown_by_its_modules():
    assert_expected_inline(
        from_dearest_to_passes(str(DETAILED)),
        """\
most expensive operations
  0.0010 ms  2%  1500 cycles  matmul, 1.inference fusion.1
      aten.mm.default at model.py:3 in forward
      aten.mul.Tensor, aten.add.Tensor in model.norm (LlamaRMSNorm)
no estimate from the compiler, counted as no cycles: 1
  1.inference custom-call.1
graph breaks: 1
  transformers/models/llama/modeling_llama.py:67 in forward: builtin print
on the CPU in between, in no figure here: 1
  1.joint aten.sort in model.norm (LlamaRMSNorm)
passes: 1, and 1 that found nothing to do
  pass       graphs  rewrote  refused
  cast_bf16       2        5        1
    refused 1: it is sensitive
      in head (Linear)""",
    )


def test_verbose_shows_every_pass_and_the_files_of_libraries():
    assert_expected_inline(
        from_dearest_to_passes(DETAILED.text(verbose=True)),
        """\
most expensive operations
  0.0010 ms  2%  1500 cycles  matmul, 1.inference fusion.1
      aten.mm.default at model.py:3 in forward
      aten.mul.Tensor, aten.add.Tensor in model.norm (LlamaRMSNorm), at
          transformers/models/llama/modeling_llama.py:67 in forward
no estimate from the compiler, counted as no cycles: 1
  1.inference custom-call.1
graph breaks: 1
  transformers/models/llama/modeling_llama.py:67 in forward: builtin print
on the CPU in between, in no figure here: 1
  1.joint aten.sort in model.norm (LlamaRMSNorm), at transformers/models/llama/modeling_llama.py:67 in forward
passes: 3
  graph    pass        rewrote  refused
  1.joint  cast_bf16         3        1
    refused mm: it is sensitive
      in head (Linear), at transformers/models/llama/modeling_llama.py:67 in forward
  2.joint  cast_bf16         2        0
  2.joint  fold_views        0        0""",
    )


def test_no_form_for_people_shows_the_folder_of_libraries_or_long_lines():
    for verbose in (False, True):
        text = DETAILED.text(verbose)
        assert "site-packages" not in text + DETAILED.to_html(verbose)
        assert max(map(len, text.splitlines())) <= 110
    assert "transformers/models/llama/modeling_llama.py:67" in DETAILED.to_html(verbose=True)


def test_details_survive_json_and_an_earlier_report_has_none():
    content = json.loads(json.dumps(DETAILED.to_dict()))
    assert AotReport.from_dict(content) == DETAILED
    del content["pass_reports"], content["fallback_reports"]
    del content["programs"][0]["dearest"][0]["origins"][0]["module"]
    earlier = AotReport.from_dict(content)
    assert "passes: 1\n  as earlier versions say it" in str(earlier)
    assert "aten.mm.default at model.py:3 in forward" in str(earlier)


def test_totals_count_every_run_of_a_program():
    report = replace(REPORT, programs=(replace(PROGRAM, runs=3), PROGRAM))
    once = REPORT.totals()
    for figure in ("cycles", "estimated_ms", "modelled_ms", "flops", "bytes", "model_flops", "flops_floor_ms"):
        assert report.totals()[figure] == pytest.approx(4 * once[figure])
    assert report.totals()["over_floor"] == pytest.approx(once["over_floor"])
    assert report.peak_bytes == REPORT.peak_bytes
    assert "3 times a step" in str(report)


def test_mfu_counts_the_matmuls_of_the_model_once_and_hfu_all_of_them():
    half = PROGRAM.model_flops // 2
    report = replace(REPORT, programs=(PROGRAM, replace(PROGRAM, recomputed_flops=half)))
    assert report.recomputed_flops == half
    assert report.hfu == REPORT.hfu == REPORT.mfu
    assert report.mfu == pytest.approx(0.75 * report.hfu)
    assert f"utilization {report.mfu:.1%} ({report.hfu:.1%} with recomputed matmuls)" in str(report)
    assert "recomputed" not in str(REPORT)
    content = report.to_dict()
    assert AotReport.from_dict(content).mfu == report.mfu
    for program in content["programs"]:
        del program["recomputed_flops"]
    assert AotReport.from_dict(content).mfu == report.hfu  # a report of an earlier version cannot tell them apart


def test_a_program_that_does_not_fit_is_reported():
    report = replace(REPORT, memory_budget_bytes=2**20)
    assert not report.fits
    assert "memory: DOES NOT FIT" in str(report)


def test_json_gives_the_same_report_back():
    content = json.loads(json.dumps(REPORT.to_dict()))
    assert AotReport.from_dict(content) == REPORT
    assert content["schema"] == SCHEMA
    assert content["totals"]["modelled_ms"] == 0.04


@pytest.mark.parametrize("content", [{"schema": 0}, {}, [], {"schema": SCHEMA}])
def test_other_json_is_refused(content):
    with pytest.raises(TPUConfigurationError, match="again"):
        AotReport.from_dict(content)


def test_the_page_is_well_formed_and_needs_no_network():
    page = REPORT.to_html()
    check(page)
    assert page.count("<svg") == 3
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_the_page_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(TPUNotAvailableError, match="pip install"):
        REPORT.to_html()


def test_equal_reports_do_not_differ():
    comparison = compare(REPORT, REPORT)
    assert comparison.worse == ()
    assert all(d.ratio == 1 for d in comparison.differences)
    assert "nothing is worse" in str(comparison)


def test_growth_past_the_threshold_is_worse_and_other_options_are_remarked():
    slower = replace(REPORT, options={}, programs=(replace(PROGRAM, modelled_ms=0.05, unknown=()),))
    comparison = compare(REPORT, slower, threshold=1.1)
    assert comparison.worse == ("modelled_ms",)
    assert comparison.remarks == (
        "options: {'level': 'aggressive'} -> {}",
        "operations without an estimate: 1 -> 0; estimated_ms is not comparable",
    )
    assert compare(REPORT, slower, threshold=1.3).worse == ()


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), 0, -1])
def test_a_threshold_that_lets_all_or_nothing_pass_is_refused(threshold):
    with pytest.raises(TPUConfigurationError, match=r"threshold=.* is invalid\. Allowed: a ratio > 0"):
        compare(REPORT, REPORT, threshold=threshold)


def test_a_file_that_is_no_report(tmp_path):
    with pytest.raises(TPUConfigurationError, match="cannot be read as JSON"):
        read_report(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(TPUConfigurationError, match="cannot be read as JSON"):
        read_report(str(tmp_path / "bad.json"))
    (tmp_path / "good.json").write_text(json.dumps(REPORT.to_dict()))
    assert read_report(str(tmp_path / "good.json")) == REPORT
