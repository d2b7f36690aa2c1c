"""The same operation of equal layers is one row of the most expensive operations."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kp_dynamo
from bench.workloads import gpt
from tests.aot.test_report import FUSION, PROGRAM, REPORT


@pytest.fixture(scope="module")
def report():
    work = gpt(6, width=128, batch=2, length=128)
    return kp_dynamo.aot_compile(work.model, work.inputs, options={"blocks": "off"})


def test_fusions_of_equal_layers_are_one_row_with_their_sum(report):
    [program] = report.programs
    alike = [fusion for fusion in program.dearest if fusion.num_alike == 6]
    assert len(alike) >= 3
    assert all(fusion.times == 6 for fusion in alike)
    modules = {origin.module for fusion in alike for origin in fusion.origins}
    assert "blocks.*.up (Linear)" in modules
    assert not any("blocks.0" in module for module in modules)
    keys = [(fusion.kind, fusion.origins) for fusion in program.dearest if fusion.origins]
    assert len(set(keys)) == len(keys)
    assert sum(fusion.modelled_ms for fusion in program.dearest) <= program.modelled_ms * 1.001


def test_the_number_is_told_in_text_and_page():
    program = replace(PROGRAM, dearest=(replace(FUSION, num_alike=12),))
    told = replace(REPORT, programs=(program,))
    assert "matmul, 1.inference fusion.1 x 12 alike" in told.text()
    assert "matmul, 1.inference fusion.1 x 12 alike" in told.to_html()
    assert "alike" not in REPORT.text() + REPORT.to_html()
