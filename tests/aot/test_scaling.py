"""A model on slices of several sizes."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

from kp_dynamo.aot.report import AotReport
from kp_dynamo.aot.scaling import scaling
from kp_dynamo.aot.scaling_result import Scaling
from kp_dynamo.cli.main import main
from kp_dynamo.exceptions import TPUConfigurationError

SPEC = """
import torch
from torch import nn

def make():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)), (torch.empty(64, 256),)
"""


def mlp() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))


@cache
def found() -> Scaling:
    return scaling(mlp(), (torch.empty(64, 256, device="meta"),), (4, 8))


def test_each_chip_has_as_many_samples():
    assert [(size.chips, size.samples) for size in found().sizes] == [(4, 64), (8, 128)]
    four, eight = (size.report for size in found().sizes)
    assert (four.slice.topology, eight.slice.topology) == ("2x2", "2x4")
    assert four.flops_floor_ms == eight.flops_floor_ms


def test_the_speed_of_a_chip_is_compared_with_the_first_slice():
    four, eight = found().sizes
    assert found().efficiency(four) == 1
    assert found().efficiency(eight) == pytest.approx(four.report.step_ms / eight.report.step_ms)


def test_the_result_as_text_json_and_a_page():
    lines = str(found()).splitlines()
    assert lines[0] == "scaling on v5e, sharding fsdp, samples of a chip constant"
    assert [line.split()[0] for line in lines[1:4]] == ["chips", "4", "8"]
    content = json.loads(json.dumps(found().to_dict()))
    assert AotReport.from_dict(content["sizes"][1]["report"]).step_ms == found().sizes[1].report.step_ms
    page = found().to_html("2026-03-01")
    assert "<svg" in page
    assert "2026-03-01" in page
    assert "2 of 2 slices compiled" in page


def test_a_slice_that_is_too_small_is_a_line():
    result = scaling(mlp(), (torch.empty(64, 256, device="meta"),), (4, 8), options={"memory_budget_gb": 1e-5})
    assert [size.report for size in result.sizes] == [None, None]
    assert "4 chips: the inference program takes at least" in str(result)
    assert "0 of 2 slices compiled" in result.to_html()


def test_the_command_line(tmp_path, capsys):
    (tmp_path / "spec.py").write_text(SPEC)
    files = tmp_path / "a.json", tmp_path / "a.html"
    asked = [
        "aot",
        f"{tmp_path / 'spec.py'}:make",
        "--chips",
        "4,8",
        "--mesh",
        "model=2",
        "--sharding",
        '{"0": "colwise"}',
    ]
    assert main([*asked, "--json", str(files[0]), "--html", str(files[1])]) == 0
    assert "data=4,model=2" in capsys.readouterr().out
    assert [size["chips"] for size in json.loads(files[0].read_text())["sizes"]] == [4, 8]
    assert "<svg" in files[1].read_text()


@pytest.mark.parametrize(
    ("chips", "how", "words"),
    [
        ((), {}, "Allowed: different numbers > 1"),
        ((4, 4), {}, "Allowed: different numbers > 1"),
        ((1, 4), {}, "Allowed: different numbers > 1"),
        ("4,8", {}, "Allowed: different numbers > 1"),
        ((4, 5), {}, "it is not sold"),
        ((4, 8), {"mesh": {"data": 4}}, "has 'data', which takes"),
        ((4, 8), {"mesh": 5}, "mesh=5 is invalid"),
        ((4, 8), {"mesh": {"model": 8}}, "4 chips do not divide"),
        ((64, 4), {}, "is not a whole number of samples"),
    ],
)
def test_bad_input(chips, how, words):
    with pytest.raises(TPUConfigurationError, match=words):
        scaling(mlp(), (torch.empty(8, 256, device="meta"),), chips, **how)


@pytest.mark.parametrize(("chips", "words"), [("4,x", "chips='4,x' is invalid"), ("4,", "chips='4,' is invalid")])
def test_bad_numbers_on_the_command_line(chips, words, tmp_path, capsys):
    (tmp_path / "spec.py").write_text(SPEC)
    assert main(["aot", f"{tmp_path / 'spec.py'}:make", "--chips", chips]) == 2
    assert words in capsys.readouterr().err
