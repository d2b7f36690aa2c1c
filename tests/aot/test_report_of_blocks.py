"""The report of a model with repeated layers: their rows, the most expensive operations, the memory."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from expecttest import assert_expected_inline

import kp_dynamo
from kp_dynamo.aot.memory_line import MemoryPoint, ProgramCall, in_order, memory_chart
from kp_dynamo.aot.report import AotReport
from tests.aot.test_report import FUSION, PROGRAM, REPORT
from tests.blocks import stacks

MIB = 2**20
LAYERS = tuple(f"model.layers.{i}" for i in range(32))
FORWARD = replace(PROGRAM, name="2.forward", runs=32, modules=LAYERS, held_bytes=62 * MIB)
BACKWARD = replace(FORWARD, name="2.backward", modelled_ms=0.08, temp_bytes=20 * MIB, held_bytes=32 * MIB)
EMBED, HEAD = (replace(PROGRAM, name=name, modules=("",)) for name in ("1.forward", "3.forward"))
CALLS = (
    ProgramCall("1.forward", 0),
    *(ProgramCall("2.forward", i * 2 * MIB) for i in range(32)),
    ProgramCall("3.forward", 64 * MIB),
    *(ProgramCall("2.backward", (32 - i) * MIB) for i in range(32)),
)
BLOCKS = replace(REPORT, programs=(EMBED, FORWARD, BACKWARD, HEAD), calls=CALLS)


def section(text: str, start: str) -> str:
    lines = text.splitlines()
    found = next(i for i, line in enumerate(lines) if line.startswith(start))
    return "\n".join(lines[found : lines.index("", found)])


def test_a_repeated_layer_is_one_row_with_its_modules_and_all_its_runs():
    assert_expected_inline(
        section(str(BLOCKS), "repeated layers"),
        """\
repeated layers, compiled once
              programs  modelled ms  share  cycles ms  peak MiB
  block x 32  2.*             3.840    98%      1.280      63.9  model.layers.0 to model.layers.31""",
    )
    assert "repeated layers" not in str(REPORT)


def test_totals_are_those_of_all_runs():
    assert BLOCKS.modelled_ms == pytest.approx(0.04 + 32 * 0.04 + 32 * 0.08 + 0.04)
    [block] = BLOCKS.blocks
    assert block.modelled_ms == pytest.approx(BLOCKS.modelled_ms - 0.08)
    assert block.cycles == BLOCKS.cycles - 2 * PROGRAM.cycles


@pytest.mark.parametrize(
    ("modules", "runs", "text"),
    [
        (("layers.1", "layers.2", "layers.3"), 3, "layers.1 to layers.3"),
        (("down.0.res", "down.2.res"), 2, "down.*.res"),
        (("encoder.0", "decoder.0"), 2, "*.0"),
        (("layers.0", "middle.layers.1"), 2, "layers.0, middle.layers.1"),
        (("shared", "shared"), 2, "shared"),
        (("", ""), 2, "the model"),
        (("layers.0", "layers.1"), 6, "layers.0 to layers.1, and 4 more"),
    ],
)
def test_modules_are_named_once(modules, runs, text):
    report = replace(REPORT, programs=(replace(FORWARD, modules=modules, runs=runs),))
    assert report.blocks[0].modules == text


def test_the_most_expensive_operations_are_those_of_all_layers():
    cheap = replace(FUSION, name="fusion.layer", modelled_ms=0.001, cycles=1000)
    dear = replace(FUSION, name="fusion.head", modelled_ms=0.01)
    programs = (replace(FORWARD, dearest=(cheap,)), replace(HEAD, dearest=(dear,)))
    lines = str(replace(BLOCKS, programs=programs, calls=())).splitlines()
    first = lines[lines.index("most expensive operations") + 1]
    assert re.sub(" +", " ", first) == (
        " 0.0320 ms 2% 32000 cycles matmul, 2.forward fusion.layer, block x 32: model.layers.0 to model.layers.31"
    )


def test_the_memory_over_the_step_is_a_picture():
    assert_expected_inline(
        section(str(BLOCKS), "memory over the step"),
        """\
memory over the step, 66 runs: # lives when a program starts, + is its own peak
  66 MiB |                               +##
         |                           +######+
         |                       +##########+++++++++
         |                   +##############+++++++++++++++++
         |               ########################++++++++++++++++++++
         |           ####################################+++++++++++++++++++
         |       ################################################+++++++++++
   8 MiB |   ############################################################+++
  in order: 1.forward, 2.forward x 32, 3.forward, 2.backward x 32
  most in run 34, 3.forward: 65.0 MiB live when it starts, 65.9 MiB at its peak""",
    )


def test_the_memory_line_holds_what_lives_and_the_peak_of_each_run():
    [first, *_, last] = BLOCKS.memory_line
    assert first == MemoryPoint("1.forward", PROGRAM.argument_bytes, PROGRAM.peak_bytes)
    assert last == MemoryPoint("2.backward", MIB + PROGRAM.argument_bytes, MIB + BACKWARD.peak_bytes)
    assert in_order(BLOCKS.memory_line) == [("1.forward", 1), ("2.forward", 32), ("3.forward", 1), ("2.backward", 32)]


def test_a_report_without_runs_has_no_picture():
    assert list(memory_chart([])) == []
    assert "over the step" not in str(REPORT)


def test_json_keeps_blocks_and_runs_and_an_earlier_report_has_none():
    content = json.loads(json.dumps(BLOCKS.to_dict()))
    assert AotReport.from_dict(content) == BLOCKS
    assert content["blocks"][0]["runs"] == 32
    assert content["memory_line"][0]["program"] == "1.forward"
    del content["calls"]
    for program in content["programs"]:
        del program["modules"]
    earlier = AotReport.from_dict(content)
    assert earlier.blocks == ()
    assert earlier.modelled_ms == BLOCKS.modelled_ms


def test_the_page_shows_the_memory_over_the_step():
    page = BLOCKS.to_html()
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 4
    for svg in drawings:
        ElementTree.fromstring(svg)
    assert "Memory over the step, at each run of a program." in page
    assert "model.layers.0 to model.layers.31" in page
    assert "All 32 layers share one program." in page


@functools.cache
def stack_report(train: bool) -> AotReport:
    x = torch.randn(2, 5, 3)
    return kp_dynamo.aot_compile(stacks.Stack(4), (x,), train=train, options={"blocks": "on"})


def test_a_compiled_stack_has_its_block():
    report = stack_report(train=True)
    [block] = report.blocks
    assert (block.runs, block.modules, block.programs) == (4, "layers.0 to layers.3", ("2.forward", "2.backward"))
    assert block.compile_s <= report.tpu_compile_s


@pytest.mark.parametrize("train", [False, True])
def test_the_memory_line_peaks_where_the_step_does(train):
    report = stack_report(train)
    assert len(report.memory_line) == sum(p.runs for p in report.programs)
    assert max(point.peak_bytes for point in report.memory_line) == report.step_peak_bytes
    for program in report.programs:
        assert max(c.held_bytes for c in report.calls if c.program == program.name) == program.held_bytes


def test_the_modules_take_the_time_of_their_program():
    report = stack_report(train=True)
    for program in report.programs:
        assert sum(row.modelled_ms for row in program.by_module) == pytest.approx(program.modelled_ms)
        assert sum(row.flops_floor_ms for row in program.by_module) == pytest.approx(program.flops_floor_ms("v5e"))
    of_layer = {row.path for p in report.programs if p.is_block for row in p.by_module if row.flops_floor_ms}
    assert of_layer
    assert all(path.startswith("layers.0") for path in of_layer)


def test_without_a_division_there_is_no_block():
    x = torch.randn(2, 5, 3)
    report = kp_dynamo.aot_compile(stacks.Stack(4), (x,), options={"blocks": "off"})
    assert report.blocks == ()
    assert [c.program for c in report.calls] == ["1.inference"]
